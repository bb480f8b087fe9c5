"""Why a launched engine failed: the known causes of failed starts and deaths, and what an operator can change.

Owns the table of causes. Pure: it maps the lines of a server's log, and the exit of its process, to one ``Cause``. The rules: the time is
linear in the length of the log, and every ``code`` is from the table, so that it can be the label of a metric.

vLLM reports a failure in the process in which it occurs (``Worker``, ``EngineCore``) and then again, without the reason, in its API server
("Engine core initialization failed. See root cause above."). So the last lines of a log rarely show the cause, and the whole log is
searched. Libraries write the reason below the name of an exception, or leave it to the line of code that raised: both belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from signal import SIGKILL

LINE_LENGTH = 300
"""Characters of a log line that a cause shows."""
_SEARCHED = 2000  # characters of a log line that are searched
_INPUT = " [type="  # what pydantic appends to a message: the kind of the error, and a part of the wrong value

_PROCESS = re.compile(r"(?:\((?P<process>\w[\w ./-]*) pid=\d+\) ?|\[rank\d+\]: ?){1,3}")
_LEVEL = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.){0,8}(?:[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Timeout)|(?<=\.)error)(?::|$)")
_TRACEBACK = re.compile(r"Traceback |The above exception was|During handling of|Process \w+:|\[|.{0,200}Warning: ")
"""Lines after the message of an exception that do not belong to it."""
_CONTINUED = 6  # lines of an exception's message below the first
_USAGE = re.compile(r"[\w ./-]{1,80}: error: ")  # argparse's
_DETAIL = re.compile(r"  (?:Value error, |Input should be )")  # pydantic's, below the name of its exception
_MESSAGE = re.compile(r"(?:terminate called|MemoryError|Killed|  what\(\): |OpenBLAS |.{1,200}: No such file or directory$)")
_ENGINE_PROCESS = re.compile(r"EngineCore|Worker|Vllm")


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a failure. ``code``: for programs. ``summary`` and ``hint``: for the operator; the hint says what to change.

    ``line``: the log line that shows it, at most ``LINE_LENGTH`` characters; empty if no line does.
    """

    code: str
    summary: str
    hint: str
    line: str = ""

    @property
    def headline(self) -> str:
        """The summary and the log line."""
        return ": ".join(part for part in (self.summary, self.line) if part)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The way in which a server's main process ended. ``text``: for the operator.

    ``status``: as in ``subprocess``; None if it is unknown or the process still runs. ``memory_kills``: the processes that the kernel has
    killed meanwhile for lack of memory; None if the kernel does not report them.
    """

    text: str
    status: int | None = None
    memory_kills: int | None = 0


_Causes = dict[Cause, re.Pattern[str]]
"""Causes, and the pattern of the log lines that show each of them."""


def _row(summary: str, hint: str, *patterns: str) -> tuple[str, str, str]:
    """Return a cause without its code. Without a pattern, it matches no line."""
    return summary, hint, "|".join(patterns) or r"(?!)"


def _table(**rows: tuple[str, str, str]) -> _Causes:
    """Return the causes of rows by code."""
    return {Cause(code, summary, hint): re.compile(pattern) for code, (summary, hint, pattern) in rows.items()}


# Sources of the patterns: vLLM 0.32 (v1/core/kv_cache_utils.py, v1/worker, config, model_executor/models/registry.py, tool_parsers,
# reasoning), PyTorch, huggingface_hub and transformers. The last line that matches any row counts; of one line, the first row.
_ROOT_CAUSES = _table(
    kv_cache_too_small=_row(
        "no memory is left for the KV cache",
        "Raise gpu-memory-utilization, use a smaller or quantized model, or spread it over more GPUs with tensor-parallel-size. "
        "Remove num-gpu-blocks-override if it is set.",
        r"No available memory for the cache blocks",
        r"not enough GPU memory available to serve even a single token",
    ),
    context_exceeds_kv_cache=_row(
        "one request of the full context length does not fit into the KV cache",
        "Lower max-model-len to the length that the log line gives, or raise gpu-memory-utilization.",
        r"To serve at least one request with the model's max seq len",
        r"The model's max seq len \(\d+\) is larger than the maximum number of tokens",
    ),
    context_exceeds_model=_row(
        "max-model-len is longer than the context that the model supports",
        "Lower max-model-len, or remove it to use the model's own length.",
        r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len",
    ),
    gpu_out_of_memory=_row(
        "the GPU's memory is used up",
        "Use a smaller or quantized model, more GPUs (tensor-parallel-size), or a lower gpu-memory-utilization or max-num-seqs. "
        "Check with nvidia-smi whether another process uses the GPU.",
        r"(?:CUDA|HIP|XPU|CUDA error:) out of memory|OutOfMemoryError",
        r"CUBLAS_STATUS_ALLOC_FAILED|Free memory on device",
    ),
    host_out_of_memory=_row(
        "the machine's memory, or the limit set for the server, is used up",
        "Give the server more memory (the container's limit, ulimit, VLLM_CPU_KVCACHE_SPACE), or launch fewer models at once.",
        r"^MemoryError|std::bad_alloc",
        r"(?:Cannot|can't) allocate memory|(?:Not enough|insufficient) memory",
        r"can't start new thread|pthread_create failed",
        r"failed to map segment from shared object|less than desired CPU memory utilization",
    ),
    weights_not_found=_row(
        "the model was not found",
        "Correct launch.model: a folder with the weights, or a name on the Hugging Face hub. Without access to the hub, the model must be "
        "in its cache (HF_HOME). A private model needs HF_TOKEN in launch.env.",
        r"HFValidationError|RepositoryNotFoundError|RevisionNotFoundError",
        r"is not a local folder and is not a valid model identifier|Invalid repository ID or local directory specified",
        r"LocalEntryNotFoundError(?!: An error happened while)|Cannot find an appropriate cached snapshot folder",
        r"Can't load the configuration of|Cannot find any model weights with|does not appear to have a file named",
    ),
    hub_rate_limited=_row(
        "the Hugging Face hub limits the rate of requests",
        'Wait some minutes, set HF_TOKEN in launch.env (a higher limit), or download the model beforehand and set HF_HUB_OFFLINE: "1".',
        r"429 (?:Too Many Requests|Client Error)",
    ),
    hub_certificate=_row(
        "the TLS certificate of the Hugging Face hub, or of a proxy before it, is not trusted",
        "Set SSL_CERT_FILE in launch.env to a file with your organization's certificate authorities.",
        r"CERTIFICATE_VERIFY_FAILED",
    ),
    model_access_denied=_row(
        "the Hugging Face hub refuses access to the model",
        "Accept the model's license on the hub, and set HF_TOKEN in launch.env to a token with read access, e.g. {env: HF_TOKEN}.",
        r"GatedRepoError|[Aa]ccess (?:to )?(?:a )?gated repo|is a gated repository",
        r"40[13] (?:Client Error|Unauthorized|Forbidden)",
    ),
    model_files_damaged=_row(
        "a file of the model is incomplete or damaged",
        "Download the model again, and compare the sizes of its files with the hub. A file of 130 bytes is a pointer: run `git lfs pull`.",
        r"SafetensorError|is not a valid JSON file|invalid load key|PytorchStreamReader failed",
    ),
    weights_mismatch=_row(
        "the weights do not fit the model's config.json",
        "Use config.json and weights of the same model and revision. Download them again if one was edited.",
        r"weights were not initialized from checkpoint|size mismatch for|Attempted to load weight",
    ),
    tokenizer_not_found=_row(
        "the tokenizer's files are missing or cannot be used",
        "Add tokenizer.json and tokenizer_config.json to the model's folder, or set tokenizer in launch.args.",
        r"Can't load tokenizer for|[Cc]ouldn't instantiate the backend tokenizer",
    ),
    lora_not_loaded=_row(
        "a LoRA adapter cannot be loaded",
        "Correct loras[].path: a folder with adapter_config.json and weights for this model. For a higher rank set max-lora-rank.",
        r"LoRAAdapterNotFoundError|Loading lora .{1,200} failed|LoRA rank \d+ is greater than max_lora_rank",
    ),
    unix_socket_unsupported=_row(
        "the command does not know --uds",
        "Nothing needs to be changed: the next start uses a TCP port of the loopback interface.",
        r"(?:unrecogni[sz]ed|unknown|unexpected|no such|invalid).{0,80}--uds\b",
    ),
    unknown_flag=_row(
        "this version of vLLM does not know an option of launch.args",
        "Correct or remove the option. `vllm-gateway check` lists every option that the installed vLLM does not know.",
        r"error: (?:unrecognized arguments|ambiguous option): ",
    ),
    invalid_flag_value=_row(
        "an option of launch.args has a value that vLLM does not accept",
        "Correct the value. `vllm-gateway command MODEL` prints the whole command line.",
        r"error: (?:argument |the following arguments are required)|  Input should be ",
    ),
    unknown_parser=_row(
        "this version of vLLM has no parser of this name",
        "Correct tool-call-parser or reasoning-parser, or use launch.preset.",
        r"invalid (?:tool call|reasoning) parser: ",
        r"(?:Reasoning|Tool) parser '[^']*' not found|[Tt]ool parser .{0,80} has not been registered",
    ),
    chat_template_not_found=_row(
        "the chat template cannot be read",
        "Correct chat-template in launch.args: a file, relative to the configuration's folder.",
        r"The supplied chat template",
    ),
    port_in_use=_row(
        "another process has the port or the socket",
        "Remove port and uds from launch.args, so that the gateway chooses a free socket, or end the other process.",
        r"[Aa]ddress already in use|EADDRINUSE|port \d+ of .{1,80} is taken",
    ),
    address_not_available=_row(
        "the machine does not have the address on which the server shall listen",
        "Remove host from launch.args, so that the gateway chooses a private socket, or write an address of this machine.",
        r"[Cc]annot assign requested address",
    ),
    cuda_driver=_row(
        "the GPU driver is missing, or does not fit this build of vLLM",
        "Update the NVIDIA driver, or install a vLLM that is built for the driver's CUDA version. In a container, check that it has GPUs.",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|Found no NVIDIA driver",
        r"unsupported display driver / cuda driver combination|the provided PTX was compiled with an unsupported toolchain",
        r"No CUDA GPUs are available|no CUDA-capable device|Failed to infer device type|Torch not compiled with CUDA enabled",
        r"CUDA error: (?:system not yet initialized|invalid device ordinal|forward compatibility)",
        r"no kernel image is available for execution|libcuda\.so|libcudart\.so|libnvrtc|libnccl\.so",
    ),
    disk_full=_row(
        "a disk is full",
        "Free space on the disk with the model cache (HF_HOME), /tmp and the logs; for a container, raise the size of /dev/shm.",
        r"No space left on device|Disk quota exceeded",
    ),
    too_many_open_files=_row(
        "the server ran out of file descriptors",
        "Raise the limit on open files (ulimit -n, LimitNOFILE) of the gateway: launched servers inherit it.",
        r"Too many open files",
    ),
    remote_code_required=_row(
        "the model contains its own code, which vLLM does not run without permission",
        "If you trust the model's authors, set trust-remote-code: true in launch.args.",
        r"trust_remote_code=True|--trust-remote-code|contains custom code which must be executed",
    ),
    unsupported_architecture=_row(
        "this version of vLLM does not support the model's architecture",
        "Use a newer vLLM, or another model. The list of supported models is in vLLM's documentation.",
        r"Model architectures .{1,300} (?:are not supported|failed to be inspected)|has no vLLM implementation",
        r"Transformers does not recognize this architecture|is supported only up to vLLM|was removed in vLLM",
    ),
    unsupported_quantization=_row(
        "the quantization does not fit the model, the GPU or this version of vLLM",
        "Remove quantization from launch.args (vLLM reads it from the model), or use a model quantized by a supported method.",
        r"Unknown quantization method|does not match the quantization method specified",
        r"The quantization method .{1,80} is not supported for the current GPU|quantization is currently not supported",
        r"Cannot find the config file for ",
    ),
    unsupported_dtype=_row(
        "the data type does not fit the GPU or the quantization",
        "Set dtype in launch.args to a type that the log line names, e.g. half on GPUs before Ampere.",
        r"Bfloat16 is only supported on GPUs|is not supported for quantization method",
        r"[Uu]nknown dtype|dtype .{1,80} is not supported",
    ),
    tensor_parallel_size=_row(
        "tensor-parallel-size does not divide the model's attention heads or weights",
        "Set tensor-parallel-size to a divisor of the number in the log line, mostly 1, 2, 4 or 8.",
        r"must be divisible by tensor parallel size",
        r"(?:is|are) not divisible by (?:tensor parallel size|tp_size|world_size|\d)",
        r"[Ww]eight (?:input|output)_size_per_partition = \d+ is not divisible",
    ),
    too_few_gpus=_row(
        "the server needs more GPUs than it can see",
        "Lower tensor-parallel-size, pipeline-parallel-size or data-parallel-size, or give the replica more GPUs in launch.gpus.",
        r"World size \(\d+\) is larger than the number of available GPUs",
        r"DP adjusted local rank .{1,80} out of bounds",
        r"is larger than the total number of (?:available )?GPUs",
    ),
    tools_without_parser=_row(
        "enable-auto-tool-choice needs a tool-call-parser",
        "Set tool-call-parser in launch.args, or use launch.preset.",
        r"--enable-auto-tool-choice requires --tool-call-parser",
    ),
)

# These often follow from a root cause, in another process or earlier in a chain of exceptions.
_LESSER_CAUSES = _table(
    hub_unreachable=_row(
        "the Hugging Face hub cannot be reached, or does not work",
        'Check the network and the proxy variables in launch.env, or download the model beforehand and set HF_HUB_OFFLINE: "1".',
        r"We couldn't connect to 'https?://|Failed to resolve 'huggingface",
        r"LocalEntryNotFoundError|NameResolutionError|MaxRetryError|OfflineModeIsEnabled",
    ),
    worker_died=_row(
        "a worker process of the server died without reporting an error",
        "It was killed, or crashed in native code: look at the kernel's log (dmesg) and at the GPU's errors (nvidia-smi, Xid).",
        r"Worker proc \S{1,80} died unexpectedly",
    ),
    file_not_found=_row(
        "a file that an option names does not exist",
        "Correct the path in launch.args. Write the absolute path, or a path relative to the configuration's folder.",
        r"FileNotFoundError: \[Errno 2\]",
    ),
    missing_package=_row(
        "a Python package that the server needs is missing or damaged",
        "Install the package into the environment of launch.command, e.g. with the extra that vLLM's documentation names.",
        r"ModuleNotFoundError|ImportError",
    ),
    gpu_communication=_row(
        "the GPUs could not communicate with each other",
        "Check nvidia-smi topo -m, the size of /dev/shm and the container's IPC mode; NCCL_DEBUG: INFO in launch.env shows more.",
        r"NCCL error|ncclUnhandledCudaError|ncclSystemError|DistBackendError",
    ),
)

# Exceptions of vLLM 0.32 whose message says nothing: the line of code that raised them shows the cause.
_RAISED_BY = (
    ("model_files_damaged", re.compile(r"length_of_metadata|raise JSONDecodeError|self\.scan_once\(|safe_open\(")),
    ("tokenizer_not_found", re.compile(r"extended\[-1\] in ids")),  # a text has no tokens
)

# Shown where nothing better is known: this always follows from something else.
_CONSEQUENCES = _table(
    engine_died=_row(
        "vLLM's engine process died without reporting an error",
        "It was killed, or crashed in native code: look at the kernel's log (dmesg) and at the GPU's errors (nvidia-smi, Xid).",
        r"EngineDeadError|EngineCore encountered an issue|(?:Engine core|WorkerProc) initialization failed",
        r"died unexpectedly|Engine core proc \S{1,80} died|GET /health: status 5\d\d",
    ),
)

_DEATHS = {cause: pattern for cause, pattern in (_LESSER_CAUSES | _CONSEQUENCES).items() if cause.code in ("worker_died", "engine_died")}

HUNG = "its engine makes no progress"
"""The reason for the restart of a server whose engine hangs."""

# Shown by the end of the process, and not by a line of the log.
_BY_EXIT = _table(
    killed_for_memory=_row(
        "the kernel killed the server for lack of memory",
        "Give the machine or the container more memory, launch fewer models at once, or lower cpu-offload-gb and the KV cache on the CPU.",
    ),
    killed=_row(
        "the server was killed by a signal",
        "Find the sender of the signal: the kernel's log (dmesg) has kills for lack of memory and crashes in native code.",
    ),
    command_not_found=_row(
        "launch.command cannot be executed",
        "Write the whole path of the program into launch.command, or set PATH for the gateway or in launch.env.",
    ),
    start_timeout=_row(
        "the server did not become healthy in time",
        "Raise launch.startup_timeout if loading takes this long; otherwise look at the log for a download, a file system or a GPU that "
        "hangs.",
    ),
    engine_hung=_row(
        "vLLM's engine made no progress on its requests",
        "Look for a GPU that hangs (nvidia-smi, Xid in dmesg), for NCCL between GPUs, and for a newer vLLM.",
    ),
    unknown=_row("", "Read the server's log; `vllm-gateway command MODEL` prints the command, to be run by hand."),
)

CAUSES: tuple[Cause, ...] = (*_ROOT_CAUSES, *_LESSER_CAUSES, *_CONSEQUENCES, *_BY_EXIT)
"""Every cause, without a log line."""
_BY_CODE = {cause.code: cause for cause in CAUSES}


def find_cause(log: str, ended: ProcessExit) -> Cause:
    """Return why a server failed that wrote ``log`` since its start, or recently.

    The order: a kill by the kernel for lack of memory, a restart because the engine hangs, the last log line that shows a root cause, how
    the process ended, a lesser cause, the last exception of the engine's processes, the death of the engine, the last exception.
    """
    if ended.memory_kills and ended.status == -SIGKILL:
        return _BY_CODE["killed_for_memory"]
    if ended.text.startswith(f"it is restarted: {HUNG}"):
        return replace(_BY_CODE["engine_hung"], line=ended.text)
    lines = list(_failure_lines(log.splitlines()))
    exit_line = _Line("", ended.text)
    return (
        _last(_ROOT_CAUSES, [*lines, exit_line])
        or _cause_of_exit(ended, lines)
        or _last(_LESSER_CAUSES, lines)
        or _last_exception(lines, of_engine=True)
        or _last(_CONSEQUENCES, [*lines, exit_line])
        or _last_exception(lines, of_engine=False)
        or _BY_CODE["unknown"]
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that reports a failure, without vLLM's prefix. ``process``: the process that wrote it, if the line names it.

    ``code`` is the line of code that raised it.
    """

    process: str
    text: str
    code: str = ""


def _failure_lines(lines: Iterable[str]) -> Iterator[_Line]:
    """Yield the lines that report a failure: exceptions, messages of the level ERROR, and messages of argparse and the C++ runtime.

    Source lines of a traceback are indented, and warnings have a level: neither shows why a server failed.
    """
    code, continued = "", 0
    for line in lines:
        text, process, level = line[:_SEARCHED], "", ""
        if (prefix := _PROCESS.match(text)) is not None:
            text, process = text[prefix.end() :], prefix["process"] or ""
        if (severity := _LEVEL.match(text)) is not None:
            text, level = text[severity.end() :], severity["level"]
        if level in ("DEBUG", "INFO", "WARNING"):
            continue
        if text[:1].isspace() and not _DETAIL.match(text) and not text.startswith("  what()"):
            code, continued = (text.strip() if text.startswith("    ") and text.strip(" ^~") else code), 0
            continue
        starts = any(shape.match(text) for shape in (_EXCEPTION, _USAGE, _DETAIL, _MESSAGE))
        continued = _CONTINUED if starts else continued - 1 if text.strip() and not _TRACEBACK.match(text) else 0
        if level or starts or continued > 0:
            yield _Line(process, text.partition(_INPUT)[0] if _DETAIL.match(text) else text, code if starts else "")
        if starts:
            code = ""


def _last(causes: _Causes, lines: list[_Line]) -> Cause | None:
    """Return the cause that the last matching line shows, or None."""
    for line in reversed(lines):
        for code, raised_by in _RAISED_BY:
            if line.code and raised_by.search(line.code):
                return next((replace(cause, line=_shown(line.text)) for cause in causes if cause.code == code), None)
        for cause, pattern in causes.items():
            if pattern.search(line.text):
                return replace(cause, line=_shown(line.text))
    return None


def _cause_of_exit(ended: ProcessExit, lines: list[_Line]) -> Cause | None:
    if ended.memory_kills and _last(_DEATHS, lines):
        return _BY_CODE["killed_for_memory"]
    if ended.status in (126, 127):
        return replace(_BY_CODE["command_not_found"], line=_shown(lines[-1].text) if lines else "")
    if ended.status is not None and ended.status < 0:
        return _BY_CODE["killed"]
    return replace(_BY_CODE["start_timeout"], line=ended.text) if ended.text.startswith("no response to GET /health within") else None


def _last_exception(lines: list[_Line], *, of_engine: bool) -> Cause | None:
    """Return the last exception that is not a consequence of another one; with ``of_engine``, of an engine core or a worker."""
    for line in reversed(lines):
        if of_engine and not _ENGINE_PROCESS.match(line.process):
            continue
        follows = any(pattern.search(line.text) for pattern in _CONSEQUENCES.values())
        if not follows and any(shape.match(line.text) for shape in (_EXCEPTION, _USAGE, _DETAIL)):
            return replace(_BY_CODE["unknown"], line=_shown(line.text))
    return None


def _shown(text: str) -> str:
    printable = "".join(char for char in text.removeprefix("  Value error, ").strip() if char.isprintable())
    return printable if len(printable) <= LINE_LENGTH else f"{printable[: LINE_LENGTH - 1]}…"
