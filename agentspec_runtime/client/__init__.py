"""The agent process: where a call is made, what is sent with it, what came back.

`context` and `scope` say where the code runs; `wire` turns that into a hint and its place in a request;
`instrument` is the wrapper at the OpenAI SDK, `call` the life of one call, `tap` and `received` the reading
of its answer; `capability` decides which servers get hints; `report` and `observer` tell others about it;
`recording` writes it down. Nothing here imports the SDK, vLLM or torch at import time.
"""
