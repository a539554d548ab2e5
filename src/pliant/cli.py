"""The `pliant` command: `pliant demo`, `pliant info`, `pliant run script.py`, `pliant tune`."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pliant

OPERATORS = ("aggregation", "attention", "geometric", "convolution")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_args(words)
    if "function" not in arguments:
        parser.exit(2, parser.format_help())
    if getattr(arguments, "script", None):  # argparse would drop a "--" among the script's own
        arguments.arguments = words[3 if words[1] == "--" else 2 :]
    return int(arguments.function(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pliant", description="Deformable-sampling operators for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"pliant {pliant.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command")

    demo = commands.add_parser(
        "demo",
        help="run the four operators: checked against float64, timed, drawn",
        description="Run the four operators forward and backward, under our names and Huawei's "
        "(mx_driving, torch_npu); check every result and gradient against the float64 reference; "
        "time them against plain PyTorch; draw where they read. Exit status 1 if anything is off.",
    )
    demo.add_argument("--device", help="where to run (default: cuda if present, else cpu)")
    demo.add_argument(
        "--operator", action="append", choices=OPERATORS, help="only this one; repeatable"
    )
    demo.add_argument(
        "--picture", type=Path, default="sampling.png", help="where to save it (%(default)s)"
    )
    demo.set_defaults(function=_demo)

    info = commands.add_parser(
        "info",
        help="versions, devices, and which backends work here",
        description="Show versions, devices, and which backends work here, or why they do not.",
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(function=_info)

    run = commands.add_parser(
        "run",
        help="run a script written for mx_driving or torch_npu, unmodified",
        description="Run a script that imports mx_driving or torch_npu, unmodified: Pliant answers "
        "to these names, and the best device here stands in for the NPU.",
    )
    run.add_argument("script", type=Path, help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    run.set_defaults(function=_run)

    tune = commands.add_parser(
        "tune",
        usage="pliant tune script.py [arguments ...]\n"
        "       pliant tune --case ID [--case ID ...] [--dtype DTYPE ...]",
        help="measure better tiles for the GPU kernels, for the calls of a script",
        description="Run a script, as `python script.py ...` would, and measure for every call "
        "of Pliant's operators, forward and backward, which tiles its kernels run fastest with on "
        "this GPU. They are kept, and later processes use them. Or do so for problems of real "
        "models, by name. Nothing is measured without this command. Exit status 1 if a tile gave "
        "another result.",
    )
    tune.add_argument(
        "--case", action="append", metavar="ID",
        help="a problem of the benchmark, say detr-enc-b1; repeatable",
    )  # fmt: skip
    tune.add_argument(
        "--dtype", action="append", choices=("float32", "float16", "bfloat16", "float64"),
        help="of its features; repeatable (default: float32)",
    )  # fmt: skip
    tune.add_argument("script", type=Path, nargs="?", help="a Python file")
    tune.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    tune.set_defaults(function=_tune)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        print(f"pliant demo needs {needs}: pip install 'pliant[demo]'", file=sys.stderr)
        return 2
    import torch
    from matplotlib.backend_bases import FigureCanvasBase

    from pliant import demo

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if arguments.picture.suffix[1:].lower() not in kinds:
        problem = f"--picture must end in one of .{', .'.join(kinds)}, got {arguments.picture}"
        print(f"pliant demo: {problem}", file=sys.stderr)
        return 2

    if arguments.device:
        try:
            torch.empty(0, device=arguments.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            print(f"pliant demo cannot run on {arguments.device!r}: {reason}", file=sys.stderr)
            return 2
    return demo.run(
        device=arguments.device, operators=arguments.operator or (), picture=arguments.picture
    )


def _info(arguments: argparse.Namespace) -> int:
    from pliant import info

    report = info.collect()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        info.show(report)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from pliant.compat import ascend

    if not arguments.script.is_file():
        print(f"pliant run: {arguments.script} is not a file", file=sys.stderr)
        return 2
    ascend.install()  # for good: threads and exit handlers may outlive the script's last line
    ascend.run_script(arguments.script, arguments.arguments)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from pliant.kernels import triton as kernels
    from pliant.testing import WORKLOADS

    cases, program = arguments.case or [], arguments.script
    problem = None
    if bool(cases) == (program is not None):
        problem = "either a script or --case is needed"
    elif arguments.dtype and not cases:
        problem = "--dtype goes with --case: a script has dtypes of its own"
    elif unknown := [case for case in cases if case not in WORKLOADS]:
        problem = f"--case must be one of {', '.join(WORKLOADS)}, got {', '.join(unknown)}"
    elif program is not None and not program.is_file():
        problem = f"{program} is not a file"
    elif kernels.INTERPRET:
        problem = "TRITON_INTERPRET=1 is set: nothing runs on a GPU that could be measured"
    elif kernels.missing():
        problem = "the GPU kernels do not work here: `pliant info` tells why"
    elif os.environ.get("PLIANT_TUNED") == "0":
        problem = "PLIANT_TUNED=0 says that nothing is to be kept"
    if problem is not None:
        print(f"pliant tune: {problem}", file=sys.stderr)
        return 2
    from pliant import tune

    return tune.run(program, arguments.arguments, cases, arguments.dtype or ["float32"])
