"""The `pliant` command, from its arguments to its exit status."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pliant
from pliant import cli, demo, info
from pliant.compat import ascend, mx_driving
from pliant.sampling import direct, ops

ATTENTION = ["demo", "--device", "cpu", "--operator", "attention"]


def test_the_installed_package_is_tested() -> None:
    if Path(sys.prefix) == Path(__file__).parents[1] / ".venv":  # the environment of `make test`
        assert Path(pliant.__file__).is_relative_to(sys.prefix)


def test_module_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pliant", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"pliant {pliant.__version__}\n"


@pytest.mark.parametrize(("argv", "status"), [(["--help"], 0), ([], 2), (["dance"], 2)])
def test_usage(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == status
    out, err = capsys.readouterr()
    assert "usage: pliant" in out + err
    listed = all(f"\n    {name} " in out + err for name in ("demo", "info", "run", "tune"))
    assert listed == (argv != ["dance"])


# pliant info


def test_info_as_json_says_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    for name in ("cpu", "triton"):
        missing = ops.backend(name).missing()
        assert report["backends"][name]["missing"] == missing
        assert report["backends"][name]["works"] == (not missing)


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_info_tells_why_a_backend_does_not_work(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(ops.backend("cpu"), "missing", lambda: ["no library", "no luck"])
    monkeypatch.setattr(ops.backend("triton"), "missing", list)
    monkeypatch.setattr(ops.backend("triton"), "describe", lambda: "all of it")
    monkeypatch.setenv("PLIANT_CHECK", "1")
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  cpu       does not work")
    assert [line.strip() for line in lines[at + 1 : at + 3]] == ["- no library", "- no luck"]
    assert "  triton    works: all of it" in lines
    chosen = lines.index("Backend where impl is not given")
    assert lines[chosen + 1] == "  reference for tensors on cpu"
    assert any(line.startswith("  PLIANT_CHECK=1 ") for line in lines)


def test_info_tells_what_a_backend_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its `supports` has it, device by device."""
    monkeypatch.setattr(info, "_device_types", lambda: ["cpu", "meta"])
    monkeypatch.setitem(ops.AUTOMATIC, "meta", "triton")
    kernels = ops.backend("triton")
    monkeypatch.setattr(kernels, "missing", list)
    monkeypatch.setattr(kernels, "describe", lambda: "Triton")

    def supports(value: torch.Tensor, loc: torch.Tensor, weight: torch.Tensor | None) -> list[str]:
        dtype = [f"features of {value.dtype}"] if value.dtype == torch.float64 else []
        return dtype if value.is_cpu else ["no such device", *dtype]

    monkeypatch.setattr(kernels, "supports", supports)
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out.partition("  triton    works: Triton\n")[2].splitlines()
    assert [line.strip() for line in shown[:2]] == [
        "- takes features of float32, float16, bfloat16 on cpu",
        "- takes nothing on meta: no such device",
    ]


def test_info_tells_of_rocm_and_of_a_missing_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    kernels = ops.backend("triton")
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("shutil.which", lambda name: None)
    missing = kernels.missing.__wrapped__
    assert missing() == []
    assert kernels.describe().endswith(", on a GPU")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert missing() == ["the kernels are for NVIDIA GPUs, and this torch is built for ROCm"]
    monkeypatch.delenv("CC")
    assert "no C compiler" in kernels.describe()


def test_info_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('triton', 'rich', 'numpy', 'matplotlib')));"
        "from pliant.cli import main; raise SystemExit(main(['info', '--json']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    triton = json.loads(run.stdout)["backends"]["triton"]
    assert not triton["works"]
    assert any("not installed" in reason for reason in triton["missing"])


# pliant demo


def test_demo_runs_what_the_command_offers() -> None:
    assert tuple(demo.JOBS) == cli.OPERATORS


def test_demo_has_the_documented_sizes() -> None:
    sizes = {
        name: [
            list(x.shape)
            for x in job.arguments.values()
            if isinstance(x, Tensor) and x.is_floating_point()
        ]
        for name, make in demo.JOBS.items()
        if (job := make(torch.Generator()))
    }
    assert sizes == {
        "aggregation": [[1, 2816, 256], [1, 10, 2000, 1, 2], [1, 10, 2000, 1, 1, 8]],
        "attention": [[1, 10000, 4, 32], [1, 16, 4, 1, 8, 2], [1, 16, 4, 1, 8]],
        "geometric": [[6, 9600, 8, 32], [6, 9680, 8, 4, 4, 2], [6, 9680, 8, 4, 4]],
        "convolution": [
            [16, 32, 32, 32], [16, 50, 32, 32], [32, 32, 5, 5], [32], [16, 25, 32, 32]
        ],
    }  # fmt: skip


def one_item(make: Callable[[torch.Generator], demo.Job]) -> Callable[[torch.Generator], demo.Job]:
    """A job with the first item of its batch alone."""

    def made(generator: torch.Generator) -> demo.Job:
        job = make(generator)
        arguments = {
            name: x[:1] if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in job.arguments.items()
        }
        return job._replace(arguments=arguments, grad=job.grad[:1])

    return made


@pytest.mark.slow
def test_demo_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.JOBS, "geometric", one_item(demo.geometric))  # the longest by far
    picture = tmp_path / "new" / "picture.png"
    assert cli.main(["demo", "--device", "cpu", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("right") == 4
    assert "wrong" not in out
    backend = info._default("cpu")
    assert out.count(f" {backend} ") == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("sample_sum", ["result"]),
        (
            "sample_sum_backward",
            [f"gradient of {x}" for x in ("value", "sampling_locations", "attention_weights")],
        ),
    ],
)
@pytest.mark.parametrize(
    "spoil", [lambda x: 1.001 * x, lambda x: x * torch.nan], ids=["off", "nan"]
)
def test_demo_fails_for_a_wrong_kernel(
    operator: str,
    wrong: list[str],
    spoil: Callable[[Tensor], Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kernels of float32 are spoilt, those of float64 are the reference that they are held to."""
    kernels = ops.backend(info._default("cpu"))
    kernel = getattr(kernels, operator)

    def spoilt(*args: Any) -> Any:
        result = kernel(*args)
        if args[0].dtype == torch.float64:
            return result
        return spoil(result) if isinstance(result, Tensor) else tuple(map(spoil, result))

    monkeypatch.setattr(kernels, operator, spoilt)
    plan = operator.replace("sample", "plan")  # which the reference has not
    monkeypatch.setattr(kernels, plan, lambda *args: None, raising=False)
    monkeypatch.setattr(direct, "plans", direct.Plans())
    assert cli.main([*ATTENTION, "--picture", str(tmp_path / "p.png")]) == 1
    out = capsys.readouterr().out
    for what in wrong:
        assert f"wrong multi_scale_deformable_attn: {what}: error" in out
        assert f"wrong multi_scale_deformable_attn: {what} of mx_driving" in out
    assert "right" not in out


def test_demo_fails_when_the_vendors_name_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = mx_driving.multi_scale_deformable_attn
    monkeypatch.setattr(
        mx_driving, "multi_scale_deformable_attn", lambda *args: function(*args) + 0.01
    )
    assert cli.main([*ATTENTION, "--picture", str(tmp_path / "p.png")]) == 1
    out = capsys.readouterr().out
    name = "mx_driving.multi_scale_deformable_attn"
    assert f"wrong multi_scale_deformable_attn: result of {name}: error" in out
    assert f"result of {name} against multi_scale_deformable_attn: error" in out
    assert "wrong multi_scale_deformable_attn: result: error" not in out


def test_demo_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else found(name)
    )
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "pliant demo needs rich: pip install 'pliant[demo]'\n"


def test_demo_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--device", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("pliant demo cannot run on 'nowhere': ")


@pytest.mark.parametrize("name", ["sampling", "sampling.foo"])
def test_demo_says_at_once_that_a_picture_cannot_be_saved(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda **_: pytest.fail("it ran"))
    assert cli.main(["demo", "--picture", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith("pliant demo: --picture must end in one of .")
    assert ".png, " in told
    assert told.endswith(f", got {name}\n")


# pliant run


@pytest.fixture
def _uninstalled() -> Iterator[None]:
    """The command leaves the names in place for the rest of its process, which here goes on."""
    yield
    ascend.uninstall()


@pytest.mark.usefixtures("_uninstalled")
def test_run_passes_arguments_and_answers_to_the_vendors_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch_npu\nfrom mx_driving import deformable_aggregation\n"
        "print(sys.argv[1:], __name__, deformable_aggregation.__module__.split('.')[0])\n"
    )
    for words in ([str(script)], ["--", str(script)]):
        assert cli.main(["run", *words, "--", "--epochs", "3"]) == 0
        assert capsys.readouterr().out == "['--', '--epochs', '3'] __main__ pliant\n"


def test_run_serves_threads_and_exit_handlers_that_outlive_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, threading, torch, torch_npu\n"
        "def say(what): print(what, torch.ones(2, device='npu').npu().sum().item())\n"
        "def late(): threading.main_thread().join(); say('thread')\n"
        "threading.Thread(target=late).start()\n"
        "atexit.register(say, 'exit')\n"
    )
    command = [sys.executable, "-m", "pliant", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "thread 2.0\nexit 2.0\n", "")


@pytest.mark.usefixtures("_uninstalled")
def test_run_ends_as_the_script_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(script)])
    assert end.value.code == 3


def test_run_without_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err == f"pliant run: {tmp_path / 'none.py'} is not a file\n"
