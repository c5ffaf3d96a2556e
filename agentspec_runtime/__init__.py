"""Structure-aware speculative decoding for LLM agents on your own vLLM."""
