"""The root cause of a failure: found in what vLLM and its libraries write, above everything that only follows from it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.support.rows import each_row
from tests.vllm.failed_starts import RECORDS, STARTS, Start, recorded
from upstream.vllm.failures import CAUSES, LINE_LENGTH, ProcessExit, find_cause

EXIT = ProcessExit("exit code 1", 1)
API = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
"""The last exception of nearly every failed start."""


@dataclass(frozen=True, slots=True)
class Case:
    """A line of a log and the cause that it shows."""

    code: str
    line: str


# Written by vLLM 0.32 on a CPU for settings that cannot work.
PROVOKED = (
    Case("kv_cache_too_small", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"),
    Case(
        "context_exceeds_kv_cache",
        "ValueError: To serve at least one request with the model's max seq len (2048), (0.0 GiB KV cache is needed, which is larger than",
    ),
    Case(
        "context_exceeds_model",
        "  Value error, User-specified max_model_len (9999999) is greater than the derived max_model_len (max_position_embeddings=32768.0",
    ),
    Case(
        "host_out_of_memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
    ),
    Case(
        "weights_not_found",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no'",
    ),
    Case(
        "weights_not_found",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the specified",
    ),
    Case("unknown_flag", "vllm: error: unrecognized arguments: --no-such-flag 1"),
    Case("unix_socket_unsupported", "old: error: unrecognized arguments: --uds /run/0.sock"),
    Case("invalid_flag_value", "vllm serve: error: argument --dtype: invalid choice: 'float99' (choose from 'auto', 'bfloat16')"),
    Case("unknown_parser", "KeyError: 'invalid tool call parser: nonesuch (chose from { apertus,cohere_command3 })'"),
    Case("unknown_parser", "KeyError: \"Reasoning parser 'nonesuch' not found. Available parsers: cohere_command3, cohere_command4\""),
    Case("port_in_use", "OSError: [Errno 98] Address already in use"),
    Case("tensor_parallel_size", "  Value error, Total number of attention heads (2) must be divisible by tensor parallel size (3)."),
    Case("unsupported_quantization", "  Value error, Cannot find the config file for awq"),
    Case(
        "engine_died",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ),
)

# They need a GPU, its driver or the hub. The lines are as users of vLLM, PyTorch and the hub have published them.
PUBLISHED = (
    Case("gpu_out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of"),
    Case("gpu_out_of_memory", "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB."),
    Case("gpu_out_of_memory", "ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired GPU memory utilization"),
    Case("cuda_driver", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"),
    Case("cuda_driver", "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda "
         "driver combination"),
    Case("cuda_driver", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    Case("cuda_driver", "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"),
    Case("cuda_driver", "RuntimeError: No CUDA GPUs are available"),
    Case("cuda_driver", "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"),
    Case("model_access_denied", "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1)"),
    Case("model_access_denied", "OSError: You are trying to access a gated repo."),
    Case("weights_not_found", "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1)"),
    Case("weights_not_found", "OSError: org/name is not a local folder and is not a valid model identifier listed on 'https://hub'"),
    Case("hub_unreachable", "OSError: We couldn't connect to 'https://huggingface.co' to load the files"),
    Case("disk_full", "OSError: [Errno 28] No space left on device"),
    Case("disk_full", "RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)"),
    Case("remote_code_required", "ValueError: The repository for org/m contains custom code which must be executed to correctly load"),
    Case("unsupported_architecture", "ValueError: Model architectures ['NewForCausalLM'] are not supported for now. Supported"),
    Case("unsupported_architecture", "  Value error, The checkpoint you are trying to load has model type `new` but Transformers does not "
         "recognize this architecture."),
    Case("unsupported_quantization", "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum"),
    Case("unsupported_dtype", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU"),
    Case("unsupported_dtype", "ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]"),
    Case("too_few_gpus", "  Value error, World size (4) is larger than the number of available GPUs (1) in this node."),
    Case("tensor_parallel_size", "ValueError: Weight output_size_per_partition = 10944 is not divisible by min_thread_n = 64."),
    Case("gpu_communication", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error"),
    Case("missing_package", "ModuleNotFoundError: No module named 'flash_attn'"),
    Case("tools_without_parser", "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser"),
    Case("chat_template_not_found", "vllm.exceptions.VLLMValidationError: The supplied chat template (t.jinja) looks like a file path"),
    Case("too_many_open_files", "OSError: [Errno 24] Too many open files"),
)  # fmt: skip


def in_a_log(line: str, process: str = "EngineCore_DP0") -> str:
    """A log as vLLM writes it: the line in the traceback of a process, and then the API server's, which says nothing."""
    prefix = f"({process} pid=71) ERROR 11-22 16:36:30 [core.py:1510] "
    traceback = ["Traceback (most recent call last):", '  File "/v/core.py", line 85, in __init__', "    raise ValueError(", line]
    api = [
        "Traceback (most recent call last):",
        '  File "/v/utils.py", line 1431, in wait_for_engine_startup',
        "    raise RuntimeError(",
        API,
    ]
    start = ["(APIServer pid=7) INFO 11-22 16:36:19 [api_server.py:1] vLLM API server version 0.32.0", *noise()]
    return "\n".join([*start, *(prefix + text for text in traceback), *api, *noise()])


def noise() -> Iterable[str]:
    """Lines that name errors and report none."""
    yield "(APIServer pid=7) WARNING 11-22 16:36:19 [system_utils.py:255] This can cause fd limit errors like `OSError: [Errno 24] Too many"
    yield "(Worker pid=9) INFO 11-22 16:36:20 [worker.py:1] CUDA out of memory is what this line is not about"
    yield "[W1122 16:36:30.95 utils.cpp:68] Warning: NUMA binding: No space left on device"
    yield "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up"


@each_row("case", [*PROVOKED, *PUBLISHED], ids=lambda case: f"{case.code}: {case.line[:50]}")
def test_the_line_that_says_why_is_found_above_the_end(case: Case) -> None:
    cause = find_cause(in_a_log(case.line), EXIT)
    assert cause.code == case.code
    assert cause.summary and cause.hint
    if case.code != "engine_died":
        assert cause.line == case.line.removeprefix("  Value error, ")


@each_row("start", STARTS, ids=lambda start: start.name)
def test_the_cause_of_a_recorded_start_is_right(start: Start) -> None:
    cause = find_cause(*recorded(start))
    assert (cause.code, bool(cause.line)) == (start.cause, True)


def test_every_record_belongs_to_a_start() -> None:
    assert {file.stem for file in RECORDS.iterdir()} == {start.name for start in STARTS} and len(STARTS) >= 25


@pytest.mark.parametrize("process", ["", "APIServer", "Worker_TP1", "APIServer pid=1) (EngineCore_DP0"])
def test_any_process_may_say_it(process: str) -> None:
    prefix = f"({process} pid=3) " if process else ""
    assert find_cause(f"{prefix}ValueError: No available memory for the cache blocks.\n{API}", EXIT).code == "kv_cache_too_small"


def test_an_unknown_exception_of_the_engine_is_shown_before_the_api_servers() -> None:
    log = f"{in_a_log('zmq.error.ContextTerminated: no')}\n{in_a_log('my.plugin.BadWeatherError: it rains')}\nFileNotFoundError: later"
    cause = find_cause(log, EXIT)
    assert (cause.code, cause.line) == ("unknown", "my.plugin.BadWeatherError: it rains")
    assert find_cause("KeyError: 'x'\nINFO: done", EXIT).line == "KeyError: 'x'"
    assert find_cause("pydantic_core.ValidationError: 1 validation error\n  Value error, odd [type=value_error, x]", EXIT).line == "odd"


def test_a_log_without_an_error_has_no_cause_to_show() -> None:
    for log in ("", "\n".join(noise())):
        cause = find_cause(log, ProcessExit("exit code 3", 3))
        assert (cause.code, cause.headline) == ("unknown", "")


@each_row(
    ("ended", "log", "code"),
    [
        (ProcessExit("killed", -9, 1), "KeyError: 'x'", "killed_for_memory"),
        (ProcessExit("exit code 0", 0, 1), in_a_log("EngineDeadError: x"), "killed_for_memory"),
        (ProcessExit("exit code 0", 0, 0), in_a_log("EngineDeadError: x"), "engine_died"),
        (ProcessExit("exit code 1", 1, 1), in_a_log("OSError: [Errno 28] No space left on device"), "disk_full"),
        (ProcessExit("exit code 0", 0, 0), in_a_log("Worker proc VllmWorker-0 died unexpectedly (exit code: None)"), "worker_died"),
        (ProcessExit("exit code 1", 1, 1), in_a_log("Worker proc VllmWorker-0 died unexpectedly (exit code: None)"), "killed_for_memory"),
        (ProcessExit("signal SIGSEGV", -11, 0), in_a_log("KeyError: 'of an earlier request'"), "killed"),
        (ProcessExit("it is restarted: GET /health: status 503"), "", "engine_died"),
        (ProcessExit("signal SIGKILL", -9, 0), "", "killed"),
        (ProcessExit("signal SIGSEGV", -11, None), "", "killed"),
        (ProcessExit("exit code 127", 127), "no-such-vllm: No such file or directory", "command_not_found"),
        (ProcessExit("no response to GET /health within 20 s"), in_a_log("EngineDeadError: x"), "start_timeout"),
        (ProcessExit("no response to GET /health within 20 s"), in_a_log("OSError: [Errno 28] No space left on device"), "disk_full"),
        (ProcessExit("port 8001 of 127.0.0.1 is taken by process 4711 (python3)"), "", "port_in_use"),
        (ProcessExit("[Errno 28] No space left on device: '/run/x'"), "", "disk_full"),
    ],
)
def test_how_it_ended_counts_too(ended: ProcessExit, log: str, code: str) -> None:
    assert find_cause(log, ended).code == code


def test_what_is_shown_of_a_line_is_short_and_printable() -> None:
    cause = find_cause(f"ValueError: \x1b[2JNo available memory for the cache blocks {'x' * 5000}", EXIT)
    assert len(cause.line) == LINE_LENGTH and cause.line.isprintable()


def test_every_cause_has_its_own_code_that_can_be_a_label() -> None:
    codes = [cause.code for cause in CAUSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z_]+", code) for code in codes)
    assert {each.code for each in (*PROVOKED, *PUBLISHED)} <= set(codes)


@pytest.mark.parametrize(
    "unit",
    [
        "a.",
        "Error",
        "dtype ",
        "Model architectures ",
        "(Worker pid=1) ",
        "ERROR 11-22 16:36:30 [a] dtype \n",
        "World size (1) \n",
        "\n",
        "  Value error, x\n",
    ],
)
def test_the_time_is_linear_whatever_the_log_holds(unit: str) -> None:
    def seconds(size: int) -> float:
        log = "ValueError: " + unit * (size // len(unit))
        began = time.process_time()
        find_cause(log, EXIT)
        return time.process_time() - began

    assert seconds(1 << 19) < 2.0, "half a megabyte: a generous bound, which anything quadratic misses by far"
