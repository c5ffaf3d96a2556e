"""`agentspec serve`: how the user's vLLM arguments and ours are joined, with vLLM's own parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentspec_runtime.engine.args import (
    ASSIST_EXECUTOR,
    CPU_WORKER,
    EXECUTOR,
    PROPOSER,
    SCHEDULER,
    AssistModel,
    cpu_kv_cache_bytes,
    dotted,
    engine_args,
    parse_assist,
)
from agentspec_runtime.engine.compat import find_vllm
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.engine.host import has_fast_bfloat16
from agentspec_runtime.engine.middleware import parse_tenant_source
from agentspec_runtime.engine.server_plan import EmbeddedFiles, ServeOptions, ServePlan, plan_server
from agentspec_runtime.errors import ConfigurationError

GIB = 1 << 30
EMBEDDED = EmbeddedFiles(name="Tiny", folder=Path("/models/tiny"), chat_template=Path("/models/t.jinja"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_vllm() is None, reason="vLLM is not installed: nothing parses its flags"),
]


@pytest.fixture(scope="module")
def vllm_serve():
    from agentspec_runtime.engine.vllm_serve import VllmServe

    return VllmServe()


@pytest.fixture
def plan(vllm_serve):
    """Plan, and read the result back with vLLM's parser."""

    def make(
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cpu: bool = True,
        fast_bfloat16: bool = True,
        cores: frozenset[int] = frozenset(),
        openmp: Path | None = None,
        options: ServeOptions | None = None,
    ):
        made: ServePlan = plan_server(
            arguments,
            options or ServeOptions(),
            parser=vllm_serve,
            embedded=lambda: EMBEDDED,
            cpu=cpu,
            environment=environment or {},
            available_bytes=8 * GIB,
            fast_bfloat16=fast_bfloat16,
            cores=cores,
            openmp=openmp,
        )
        return made, vllm_serve.parse(made.arguments)

    return make


PLAIN = ServeOptions(plain=True)


def test_nothing_given_serves_the_embedded_model_with_our_scheduler(plan):
    made, parsed = plan()
    assert parsed.model_tag == "/models/tiny"
    assert parsed.served_model_name == ["Tiny"]
    assert parsed.chat_template == "/models/t.jinja"
    assert (parsed.tool_call_parser, parsed.enable_auto_tool_choice) == ("hermes", True)
    assert parsed.scheduler_cls == SCHEDULER
    assert parsed.async_scheduling is False
    assert parsed.distributed_executor_backend == EXECUTOR
    assert parsed.worker_cls == CPU_WORKER
    assert parsed.speculative_config == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 32,
    }
    assert parsed.per_request_spec_decode_metrics == "detailed"
    assert parsed.enable_per_request_metrics is True
    assert parsed.host == "127.0.0.1"
    assert parsed.kv_cache_memory_bytes == 3 * GIB
    assert parsed.middleware == ["agentspec_runtime.engine.middleware.AgentSpecMiddleware"]
    assert made.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_AOT_COMPILE": "0"}
    assert made.command.startswith(
        "VLLM_USE_V2_MODEL_RUNNER=0 VLLM_USE_AOT_COMPILE=0 vllm serve /models/tiny "
    )


def test_drafts_with_lora_fit_into_the_step_that_vllm_reserves(plan):
    """vLLM refuses to start otherwise; its own default for CPUs is 2,048 tokens for 128 requests."""
    _, parsed = plan("--enable-lora")
    assert parsed.speculative_config["num_speculative_tokens"] == 15
    for limits in (["--max-num-batched-tokens=8192"], ["--max-num-seqs=8", "--max-num-batched-tokens=264"]):
        _, parsed = plan("--enable-lora", *limits)
        assert parsed.speculative_config["num_speculative_tokens"] == 32
    _, parsed = plan("--enable-lora", "--spec-tokens=7")
    assert parsed.speculative_config["num_speculative_tokens"] == 7
    with pytest.raises(ConfigurationError, match=r"\(2048\).*\(128\) x 17.*--spec-tokens 15"):
        plan("--enable-lora", "--spec-tokens=16")
    with pytest.raises(ConfigurationError, match=r"x 33\. Raise the first, lower the second$"):
        plan("--enable-lora", "--max-num-seqs=2048")
    _, parsed = plan("--enable-lora", "--max-num-seqs=2048", options=PLAIN)
    assert parsed.speculative_config is None


def test_plain_is_the_same_server_without_speculation(plan):
    made, parsed = plan(options=PLAIN)
    assert parsed.model_tag == "/models/tiny"
    assert (parsed.scheduler_cls, parsed.speculative_config, parsed.async_scheduling) == (None, None, None)
    assert parsed.additional_config == {}
    assert parsed.worker_cls == CPU_WORKER
    assert plan("--worker-cls=my.Worker", options=PLAIN)[1].worker_cls == "my.Worker"
    assert plan(options=PLAIN, cpu=False)[1].worker_cls == "auto"
    assert parsed.per_request_spec_decode_metrics == "none"
    assert parsed.middleware == ["agentspec_runtime.engine.middleware.AgentSpecMiddleware"]
    assert made.environment == {"VLLM_USE_AOT_COMPILE": "0"}


@pytest.mark.parametrize(
    ("arguments", "cpu", "backend"),
    [((), False, None), (("--distributed-executor-backend", "mp"), True, "mp"), ((), True, EXECUTOR)],
)
def test_the_executor_is_ours_only_on_a_cpu_and_if_nobody_chose(
    plan, arguments: tuple[str, ...], cpu: bool, backend: str | None
):
    assert plan(*arguments, cpu=cpu)[1].distributed_executor_backend == backend


@pytest.mark.parametrize(
    ("arguments", "cpu", "fast", "dtype"),
    [
        ((), True, False, "float32"),
        (("--dtype", "bfloat16"), True, False, "bfloat16"),
        (("some/model",), True, False, "auto"),
        ((), True, True, "auto"),
        ((), False, False, "auto"),
    ],
)
def test_a_processor_without_bfloat16_computes_the_embedded_model_in_float32(
    plan, arguments: tuple[str, ...], cpu: bool, fast: bool, dtype: str
):
    assert plan(*arguments, cpu=cpu, fast_bfloat16=fast)[1].dtype == dtype


THREADS = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("arguments", "cores", "cpu", "given", "threads"),
    [
        ((), 2, True, {}, "0,1"),
        ((), 4, True, {}, "0,1,2,3"),
        ((), 5, True, {}, None),
        ((), 1, True, {}, None),
        ((), 2, False, {}, None),
        ((), 2, True, {THREADS: "1"}, None),
        (("--tensor-parallel-size", "2"), 2, True, {}, None),
    ],
)
def test_every_core_of_a_small_machine_computes(
    plan, arguments: tuple[str, ...], cores: int, cpu: bool, given: dict[str, str], threads: str | None
):
    made, _ = plan(*arguments, cores=frozenset(range(cores)), cpu=cpu, environment=given, options=PLAIN)
    assert made.environment.get(THREADS) == threads


LIBRARY = Path("/env/lib/libiomp5.so")


@pytest.mark.parametrize(
    ("openmp", "cpu", "before", "after"),
    [
        (LIBRARY, True, None, str(LIBRARY)),
        (LIBRARY, True, "/usr/lib/libtcmalloc.so", f"/usr/lib/libtcmalloc.so:{LIBRARY}"),
        (LIBRARY, True, "/home/tomp/libtcmalloc.so", f"/home/tomp/libtcmalloc.so:{LIBRARY}"),
        (LIBRARY, True, "/usr/lib/libgomp.so.1", None),
        (LIBRARY, True, "/usr/lib/libomp5.so", None),
        (LIBRARY, False, None, None),
        (None, True, None, None),
        (Path("/my env/lib/libiomp5.so"), True, None, None),
    ],
)
def test_intels_openmp_is_loaded_first_on_a_cpu(
    plan, openmp: Path | None, cpu: bool, before: str | None, after: str | None
):
    """vLLM warns that speculation is slow without it; another OpenMP that somebody chose stays."""
    given = {} if before is None else {"LD_PRELOAD": before}
    for options in (PLAIN, ServeOptions()):
        made, _ = plan(openmp=openmp, cpu=cpu, environment=given, options=options)
        assert made.environment.get("LD_PRELOAD") == after


@pytest.mark.parametrize(
    ("cpu", "given", "value"),
    [(True, {}, "0"), (False, {}, None), (True, {"VLLM_USE_AOT_COMPILE": "1"}, None)],
)
def test_a_cpu_server_keeps_what_it_compiled_where_it_finds_it_again(
    plan, cpu: bool, given: dict[str, str], value: str | None
):
    made, _ = plan(cpu=cpu, environment=given, options=PLAIN)
    assert made.environment.get("VLLM_USE_AOT_COMPILE") == value


@pytest.mark.parametrize(
    ("line", "fast"),
    [
        ("flags\t\t: fpu sse avx2 fma", False),
        ("flags\t\t: fpu avx2 avx512f avx512bw", True),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("processor\t: 0", True),
    ],
)
def test_bfloat16_is_read_from_the_processor(tmp_path: Path, line: str, fast: bool):
    file = tmp_path / "cpuinfo"
    file.write_text(f"vendor_id : x\n{line}\n")
    assert has_fast_bfloat16(file) is fast
    assert has_fast_bfloat16(tmp_path / "none")


def test_named_model_gets_nothing_of_the_embedded_one(plan):
    _, parsed = plan("some/model", "--max-model-len", "2k")
    assert (parsed.model_tag, parsed.max_model_len) == ("some/model", 2000)
    assert (parsed.chat_template, parsed.tool_call_parser, parsed.served_model_name) == (None, None, None)


@pytest.mark.parametrize("arguments", [("--model", "some/model"), ("--model=some/model", "--seed", "1")])
def test_model_may_be_named_by_flag(plan, arguments: tuple[str, ...]):
    assert plan(*arguments)[1].model_tag == "some/model"


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("--host", "0.0.0.0"), "host", "0.0.0.0"),
        (("--host=::1",), "host", "::1"),
        (("--served_model_name", "a", "b"), "served_model_name", ["a", "b"]),
        (("--chat-template", "x"), "chat_template", "x"),
        (("--tool-call-parser", "mistral"), "tool_call_parser", "mistral"),
        (("--no-enable-auto-tool-choice",), "enable_auto_tool_choice", False),
        (("--per-request-spec-decode-metrics", "none"), "per_request_spec_decode_metrics", "none"),
        (("--no-enable-per-request-metrics",), "enable_per_request_metrics", False),
        (("--disable-log-stats",), "enable_per_request_metrics", False),
        (("--kv-cache-memory-bytes", "1G"), "kv_cache_memory_bytes", GIB),
        (("--gpu-memory-utilization", "0.5"), "kv_cache_memory_bytes", None),
        (("-tp", "2"), "tensor_parallel_size", 2),
    ],
)
def test_flags_of_the_user_win(plan, arguments: tuple[str, ...], name: str, value: object):
    assert getattr(plan(*arguments)[1], name) == value


def test_memory_is_left_to_vllm_on_a_gpu_and_where_the_user_said(plan):
    assert plan(cpu=False)[1].kv_cache_memory_bytes is None
    assert plan(environment={"VLLM_CPU_KVCACHE_SPACE": "2"})[1].kv_cache_memory_bytes is None


def test_middleware_of_the_user_stays_beside_ours(plan):
    assert len(plan("--middleware", "a.B", "--middleware", "a.C")[1].middleware) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("--spec-tokens", "8"),
        ("--spec-tokens=8",),
        ("--speculative-config.num_speculative_tokens", "8"),
        ("--speculative_config.num-speculative-tokens=8",),
        ("-sc", '{"num_speculative_tokens": 8}'),
        ("--speculative-config", '{"method": "custom_class", "num_speculative_tokens": 8}'),
    ],
)
def test_draft_length_is_set_with_any_spelling_of_vllm(plan, arguments: tuple[str, ...]):
    made, parsed = plan(*arguments, "--seed", "3")
    assert parsed.speculative_config == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 8,
    }
    assert (parsed.spec_tokens, parsed.seed) == (None, 3)
    assert "-sc" not in made.arguments


def test_a_model_drafter_of_vllm_stands_beside_ours(plan):
    options = ServeOptions(assist=AssistModel("eagle3", "some/head"))
    _, parsed = plan(options=options)
    assert parsed.speculative_config == {
        "method": "eagle3",
        "model": "some/head",
        "num_speculative_tokens": 32,
        "disable_eagle_block_drop": True,
    }
    assert parsed.worker_cls == CPU_WORKER
    assert parsed.distributed_executor_backend == ASSIST_EXECUTOR
    _, other = plan(options=ServeOptions(assist=AssistModel("draft_model", "some/model")))
    assert "disable_eagle_block_drop" not in other.speculative_config
    assert plan(options=options, cpu=False)[1].worker_cls == "auto"
    with pytest.raises(ConfigurationError, match="model 'other/head'"):
        plan("--spec-model", "other/head", options=options)


@pytest.mark.parametrize("text", ["eagle3", "eagle3:", "ngram:x", ":x", "suffix:some/model"])
def test_an_assist_that_cannot_be_is_refused(text: str):
    with pytest.raises(ConfigurationError, match="METHOD:MODEL"):
        parse_assist(text)


def test_additional_config_is_merged_and_the_users_part_wins(plan):
    options = ServeOptions(config=EngineConfig(memory_mb=64, hints=False))
    _, parsed = plan(
        "--additional-config", '{"other": [1, {"a": 2}], "agentspec": {"memory_mb": 32}}', options=options
    )
    assert parsed.additional_config == {
        "other": [1, {"a": 2}],
        "agentspec": {"memory_mb": 32, "hints": False},
    }


def test_yaml_file_counts_as_given(plan, tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("model: some/model\nhost: 10.0.0.1\nspeculative-config:\n  num_speculative_tokens: 5\n")
    _, parsed = plan("--config", str(path))
    assert parsed.host == "10.0.0.1"
    assert parsed.model == "some/model"
    assert parsed.speculative_config["num_speculative_tokens"] == 5
    assert parsed.speculative_config["model"] == PROPOSER


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scheduler-cls", "a.B"), "--scheduler-cls a.B contradicts"),
        (("--async-scheduling",), "--async-scheduling"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'), "method 'ngram'"),
        (("--spec-method", "eagle3"), "method 'eagle3'"),
        (("--spec-model", "some/draft"), "model 'some/draft'"),
        (("--spec-tokens", "0"), "num_speculative_tokens 0"),
        (("--speculative-config.num_speculative_tokens", "many"), "num_speculative_tokens 'many'"),
        (("--additional-config", '{"agentspec": {"memory_mb": 1}}'), "additional_config.agentspec.memory_mb"),
        (("--additional-config", '{"agentspec": {"typo": 1}}'), "additional_config.agentspec.typo"),
    ],
)
def test_contradictions_are_refused_and_a_way_out_named(plan, arguments: tuple[str, ...], said: str):
    with pytest.raises(ConfigurationError) as caught:
        plan(*arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [("--scheduler-cls", "a.B"), ("--async-scheduling",), ("--spec-method", "ngram", "--spec-tokens", "4")],
)
def test_plain_takes_what_vllm_takes(plan, arguments: tuple[str, ...]):
    assert plan(*arguments, options=PLAIN)


def test_other_model_runner_is_refused(plan):
    with pytest.raises(ConfigurationError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        plan(environment={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    made, _ = plan(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}, cpu=False)
    assert made.environment == {}


def test_spans_go_by_the_protocol_that_fits_the_endpoint(plan):
    options = ServeOptions(otlp=("http://c:4318/v1/traces", "http/protobuf"))
    made, parsed = plan(options=options)
    assert parsed.otlp_traces_endpoint == "http://c:4318/v1/traces"
    assert made.environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    with pytest.raises(ConfigurationError, match="one of them"):
        plan("--otlp-traces-endpoint", "http://other", options=options)


def test_tenants_need_pythons_http_server_and_share_one_key(plan):
    options = ServeOptions(tenant_from=parse_tenant_source("header:X-Tenant"))
    made, _ = plan(options=options)
    assert made.environment["AGENTSPEC_TENANT_FROM"] == "header:x-tenant"
    assert len(made.environment["AGENTSPEC_TENANT_KEY"]) == 64
    assert made.environment["AGENTSPEC_TENANT_KEY"] not in made.command
    assert (
        "AGENTSPEC_TENANT_KEY"
        not in plan(options=options, environment={"AGENTSPEC_TENANT_KEY": "k"})[0].environment
    )
    with pytest.raises(ConfigurationError, match="--tenant-from"):
        plan(options=options, environment={"VLLM_USE_RUST_FRONTEND": "1"})


def test_no_option_of_ours_hides_one_of_vllm(vllm_serve):
    from typer.main import get_command

    from agentspec_runtime.cli import app

    _, serve_parser = vllm_serve._parser
    theirs = {flag for action in serve_parser._actions for flag in action.option_strings}
    ours = {flag for option in get_command(app).commands["serve"].params for flag in option.opts}
    assert ours & theirs <= {"--help", "-h"}


def test_engine_args_are_the_same_for_python_and_for_the_command_line(vllm_serve):
    from vllm import EngineArgs

    config = EngineConfig(scope="session", memory_mb=64, cost_curve="/tmp/a b/1k")
    arguments = engine_args(config, num_speculative_tokens=7, kv_cache_memory_bytes=GIB)
    parsed = vllm_serve.parse(["some/model", *arguments.cli])
    in_python = EngineArgs(model="some/model", **arguments.kwargs)
    for name in arguments.kwargs:
        assert getattr(parsed, name) == getattr(in_python, name), name
    assert EngineConfig(**in_python.additional_config["agentspec"]) == config


@pytest.mark.parametrize(
    "value",
    ["a", "true", "1", "1k", "4G", "a b", "/tmp/x", "", "NaN", '{"a": 1}', "ü", 3, 0.5, None, [1, "a"], True],
)
def test_dotted_values_survive_vllms_parser(vllm_serve, value: object):
    arguments = dotted("--additional-config", {"a": {"b_c": value}})
    assert vllm_serve.parse(["m", *arguments]).additional_config == {"a": {"b_c": value}}


@pytest.mark.parametrize(
    ("available", "chosen"), [(None, 2 * GIB), (GIB, GIB), (6 * GIB, 2 * GIB), (64 * GIB, 4 * GIB)]
)
def test_kv_cache_on_a_cpu_leaves_room(available: int | None, chosen: int):
    assert cpu_kv_cache_bytes(available) == chosen


def test_arguments_are_json(tmp_path: Path):
    document = json.loads(json.dumps(engine_args().kwargs))
    assert document["additional_config"] == {"agentspec": {}}
