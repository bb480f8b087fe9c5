"""Prints the names that an installed vLLM knows, as JSON on the last line. Run by that vLLM's interpreter.

It must not import this project, and ends with an error if this vLLM has other modules.
"""

from __future__ import annotations

import json


def main() -> None:
    """Print the names of vLLM's own parser and its registries (vllm/entrypoints/launchers, vllm/reasoning, vllm/tool_parsers)."""
    from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
    from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found]
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[import-not-found]
    parser = make_arg_parser(FlexibleArgumentParser())
    names = {
        "flags": sorted({name[2:] for action in parser._actions for name in action.option_strings if name.startswith("--")}),
        "reasoning_parsers": ReasoningParserManager.list_registered(),
        "tool_parsers": ToolParserManager.list_registered(),
    }
    print(f"\n{json.dumps(names)}", flush=True)


if __name__ == "__main__":
    main()
