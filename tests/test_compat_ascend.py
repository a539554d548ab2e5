"""The vendor's names in place of the real packages: put, used by scripts, and taken away again."""

import concurrent.futures
import copy
import importlib
import importlib.util
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import overrides, serialization

from pliant.compat import ascend, mx_driving, torch_npu
from pliant.compat.torch_npu.npu import standin

EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "ascend").glob("*.py"))
HERE = standin().type

for name in ("mx_driving", "torch_npu"):
    if name in sys.modules or importlib.util.find_spec(name):
        pytest.skip("the vendor's packages are installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def _no_namespace() -> None:
    """PyTorch makes one when something first asks for it, maybe a test of another file."""
    vars(torch.ops).pop("npu", None)


@pytest.fixture
def _installed() -> Iterator[None]:
    ascend.install()
    yield
    ascend.uninstall()


def state() -> dict[str, Any]:
    """All that `install` may touch, without what PyTorch imports on its own when first used."""
    submodules = {k for k, v in vars(torch).items() if isinstance(v, ModuleType) and k != "npu"}
    return {
        "torch": {k: v for k, v in vars(torch).items() if k not in submodules},
        "Tensor": dict(vars(torch.Tensor)),
        "Module": dict(vars(torch.nn.Module)),
        "autocast": dict(vars(torch.autocast)),
        "Thread": dict(vars(threading.Thread)),
        "ops": "npu" in vars(torch.ops),
        "modules": {n for n in sys.modules if re.match(r"(mx_driving|torch_npu|torch\.npu)\b", n)},
        "meta_path": list(sys.meta_path),
        "modes": overrides._get_current_function_mode_stack(),
        "packages": list(serialization._package_registry),
    }


# Put and taken away


def test_uninstall_leaves_nothing() -> None:
    before = state()
    ascend.install()
    during = state()
    import mx_driving.ops.npu_deformable_aggregation  # noqa: F401
    import torch_npu.contrib.module

    torch_npu.contrib.module.DCNv2(2, 2, 1).npu()
    torch.ops.npu.npu_deformable_conv2d  # noqa: B018
    ascend.uninstall()
    assert {part for part in before if before[part] != during[part]} == set(before)
    after = state()
    for part, was in before.items():
        assert after[part] == was, part


def test_after_uninstall_the_names_are_unknown() -> None:
    ascend.install()
    ascend.uninstall()
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'torch_npu'$"):
        importlib.import_module("torch_npu")
    with pytest.raises(RuntimeError, match="device string: npu"):
        torch.zeros(1, device="npu")
    assert not hasattr(torch.zeros(1), "npu")
    assert not hasattr(torch.ops.npu, "npu_deformable_conv2d")
    del torch.ops.npu


def test_twice_is_as_once() -> None:
    before = state()
    ascend.install()
    during = state()
    ascend.install()
    assert state() == during
    ascend.uninstall()
    assert state() == before
    ascend.uninstall()
    assert state() == before


@pytest.mark.parametrize("name", ["mx_driving", "torch_npu"])
def test_install_refuses_where_a_real_package_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = state()
    message = (
        f"ascend.install: the real package {name} is importable here and is not replaced; "
        "use it, or run where it is not installed"
    )
    with pytest.raises(RuntimeError) as raised:
        ascend.install()
    assert str(raised.value) == message
    assert state() == before
    (tmp_path / f"{name}.py").unlink()
    real = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, real)
    with pytest.raises(RuntimeError) as raised:
        ascend.install()
    assert str(raised.value) == message
    assert sys.modules[name] is real


def test_a_failed_install_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()

    def fail(undo: Any) -> None:
        raise OSError("last step")

    with monkeypatch.context() as patch:
        patch.setattr(ascend, "_add_device_strings", fail)
        with pytest.raises(OSError, match=r"^last step$"):
            ascend.install()
    assert state() == before
    ascend.install()
    assert hasattr(torch, "npu")
    ascend.uninstall()
    assert state() == before


def test_modes_entered_since_survive_uninstall() -> None:
    class Mine(overrides.TorchFunctionMode):
        pass

    ascend.install()
    with Mine() as mine:
        ascend.uninstall()
        assert overrides._get_current_function_mode_stack() == [mine]


def test_uninstall_in_another_thread_is_harmless() -> None:
    before = state()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        other.submit(ascend.install).result()
        assert other.submit(torch.zeros, 1, device="npu").result().device.type == HERE
        ascend.uninstall()
        with pytest.raises(RuntimeError, match="npu"):
            other.submit(torch.zeros, 1, device="npu").result()
    assert state() == before


# Names


@pytest.mark.usefixtures("_installed")
def test_packages_are_the_compatible_ones() -> None:
    import mx_driving as mx
    import torch.npu
    import torch_npu as tn
    from mx_driving.ops.geometric_kernel_attention import GeometricKernelAttentionFunc
    from torch_npu.contrib.module import DCNv2

    assert mx is mx_driving
    assert tn is torch_npu
    assert torch.npu is torch_npu.npu
    assert GeometricKernelAttentionFunc.apply is mx_driving.geometric_kernel_attention
    assert DCNv2 is torch_npu.contrib.DCNv2
    assert mx_driving.__name__ == mx_driving.__spec__.name == "pliant.compat.mx_driving"
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'mx_driving\.nothing'$"):
        importlib.import_module("mx_driving.nothing")


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", ["fused", "point"])
def test_an_import_of_an_old_module_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"pliant.compat.mx_driving.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"^mx_driving.{name} is deprecated: "):
        importlib.import_module(f"mx_driving.{name}")


@pytest.mark.usefixtures("_installed")
def test_the_registered_operator() -> None:
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    weight, offset = torch.randn(6, 4, 3, 3).double(), torch.randn(2, 27, 5, 5).double()
    args = (x, weight, offset, None, [3, 3], [1, 1, 1, 1], [1, 1, 1, 1])
    for function in (
        torch.ops.npu.npu_deformable_conv2d,
        torch.ops.npu.npu_deformable_conv2d.default,
        torch.compile(torch.ops.npu.npu_deformable_conv2d, fullgraph=True, backend="aot_eager"),
    ):
        got, expected = function(*args), torch_npu.npu_deformable_conv2d(*args)
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(r[0].sum() + r[1].sum(), x)[0] for r in (got, expected)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


# Devices

SPELLINGS = {
    "tensor.npu": lambda x: x.npu(),
    "tensor.npu-index": lambda x: x.npu(0, non_blocking=True),
    "tensor.npu-string": lambda x: x.npu("npu:0"),
    "tensor.to": lambda x: x.to("npu"),
    "tensor.to-index": lambda x: x.to("npu:0"),
    "tensor.to-dtype": lambda x: x.to("npu", torch.float64),
    "tensor.to-keyword": lambda x: x.to(device="npu"),
    "tensor.to-device": lambda x: x.to(torch.device("npu:0")),
    "tensor.new_zeros": lambda x: x.new_zeros(2, device="npu"),
    "tensor.new_tensor": lambda x: x.new_tensor([2], device="npu"),
    "rand_like": lambda x: torch.rand_like(x, device="npu"),
    "rand": lambda x: torch.rand(2, device="npu"),
    "randn": lambda x: torch.randn(2, device="npu:0"),
    "empty": lambda x: torch.empty(2, device="npu"),
    "zeros-device": lambda x: torch.zeros(2, device=torch.device("npu", 0)),
    "tensor": lambda x: torch.tensor([1.0], device="npu"),
    "as_tensor": lambda x: torch.as_tensor([1.0], device="npu"),
    "arange": lambda x: torch.arange(3, device="npu"),
    "full": lambda x: torch.full((2,), 1.0, device="npu"),
    "from-a-thread": lambda x: in_a_thread(lambda: torch.zeros(2, device="npu")),
    "module.npu": lambda x: torch.nn.Linear(2, 2).npu().weight,
    "module.to": lambda x: torch.nn.Linear(2, 2).to("npu").weight,
    "module.to-keyword": lambda x: torch.nn.Linear(2, 2).to(device="npu:0").weight,
    "module.to_empty": lambda x: torch.nn.Linear(2, 2, device="meta").to_empty(device="npu").weight,
    "module-made": lambda x: torch.nn.Linear(2, 2, device="npu").weight,
    "parameter": lambda x: torch.nn.Parameter(x).npu(),
    "with-device": lambda x: within(torch.device("npu"), lambda: torch.zeros(2)),
}


def in_a_thread(make: Any) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def within(context: Any, make: Any) -> Any:
    with context:
        return make()


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("make", SPELLINGS.values(), ids=SPELLINGS)
def test_npu_is_the_device_that_stands_in(make: Any) -> None:
    got = make(torch.ones(3))
    assert got.device.type == HERE
    assert got.is_npu


@pytest.mark.usefixtures("_installed")
def test_torch_device() -> None:
    for device in (
        torch.device("npu:0"),
        torch.device("npu", 0),
        torch.device(type="npu", index=0),
        torch.device(device="npu:0"),
    ):
        assert isinstance(device, torch.device)
        assert device == torch.zeros(1).npu(0).device
    assert torch.device("npu") == standin()
    assert torch.device("cpu", 0) == torch.device("cpu:0")
    assert not torch.zeros(1, device="meta").is_npu


@pytest.mark.usefixtures("_installed")
def test_another_string_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(ascend, "standin", lambda *_: torch.device("meta"))
        assert x.to("npu").is_meta
        assert torch.equal(torch.einsum("npu", x), x)
    with pytest.raises(RuntimeError, match="device string: npux"):
        x.to("npux")


@pytest.mark.usefixtures("_installed")
def test_gradients_cross_to_the_device() -> None:
    x = torch.rand(3, requires_grad=True)
    (x.npu() * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.usefixtures("_installed")
def test_autocast() -> None:
    a = torch.rand(2, 2).npu()
    with torch.autocast("npu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with torch.amp.autocast(device_type="npu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype == torch.bfloat16


@pytest.mark.usefixtures("_installed")
def test_load_to_the_device(tmp_path: Path) -> None:
    state = {"weight": torch.rand(3)}
    torch.save(state, tmp_path / "model.pt")
    for location in ("npu", "npu:0", torch.device("npu"), {"cpu": "npu:0"}):
        got = torch.load(tmp_path / "model.pt", map_location=location)["weight"]
        assert got.device.type == HERE
        assert torch.equal(got.cpu(), state["weight"])


def test_load_what_was_saved_on_an_npu(tmp_path: Path) -> None:
    saved = torch.rand(3)
    before = list(serialization._package_registry)
    serialization.register_package(0, lambda storage: "npu:0", lambda storage, location: None)
    torch.save(saved, tmp_path / "model.pt")
    serialization._package_registry[:] = before
    with pytest.raises(RuntimeError, match=r"tagged with npu:0"):
        torch.load(tmp_path / "model.pt")
    ascend.install()
    got = torch.load(tmp_path / "model.pt")
    ascend.uninstall()
    assert got.device.type == HERE
    assert torch.equal(got.cpu(), saved)


@pytest.mark.usefixtures("_installed")
@pytest.mark.xfail(
    torch.__version__.startswith("2.11."),
    reason="Dynamo of torch 2.11 hides torch.tensor from function modes",
)
def test_compiled_functions() -> None:
    def attention(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> Any:
        shapes = torch.tensor([[4, 5]], device="npu")
        starts = torch.zeros(1, dtype=torch.int64, device="npu")
        return mx_driving.multi_scale_deformable_attn(
            value.npu(), shapes, starts, locations.to("npu"), weights.npu()
        )

    args = [torch.rand(1, 20, 2, 4), torch.rand(1, 3, 2, 1, 2, 2), torch.rand(1, 3, 2, 1, 2)]
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        leaves = [copy.deepcopy(a).requires_grad_() for a in args]
        output = function(*leaves)
        output.sum().backward()
        results.append([output.detach(), *(x.grad for x in leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


# Scripts


def python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-c", code, *argv],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run(script: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pliant.compat import ascend; ascend.run_script(sys.argv[1], sys.argv[2:])"
    )
    return python(code, str(script), *argv)


def test_there_is_an_example_for_each_operator() -> None:
    assert [p.stem for p in EXAMPLES] == [
        "deformable_aggregation",
        "geometric_kernel_attention",
        "multi_scale_deformable_attn",
        "npu_deformable_conv2d",
    ]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_examples(script: Path) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{script.stem}: [")
    assert done.stdout.endswith("gradients agree\n")


SCRIPTS = {
    "aggregation": """
        import torch, torch_npu
        from mx_driving import deformable_aggregation

        maps = torch.ones(1, 12 * 20, 64)
        sizes = torch.tensor([[[12, 20]]])
        starts = torch.tensor([[0]])
        places = torch.rand(1, 4, 50, 1, 2)
        scores = torch.randn(1, 4, 50, 1, 1, 8)
        maps.requires_grad = True
        out = deformable_aggregation(
            maps.npu(), sizes.npu(), starts.npu(), places.npu(), scores.npu())
        out.backward(torch.ones_like(out))
        assert maps.grad.shape == maps.shape
        print(tuple(out.shape))
        """,
    "aggregation-fused": """
        import torch, torch_npu
        import mx_driving.fused

        maps = torch.ones(1, 12 * 20, 64).npu()
        sizes, starts = torch.tensor([[[12, 20]]]).int().npu(), torch.tensor([[0]]).int().npu()
        places, scores = torch.rand(1, 4, 50, 1, 2).npu(), torch.rand(1, 4, 50, 1, 1, 8).npu()
        maps.requires_grad_()
        out = mx_driving.fused.npu_deformable_aggregation(maps, sizes, starts, places, scores)
        out.sum().backward()
        print(tuple(out.shape))
        """,
    "attention": """
        import torch, torch_npu
        from mx_driving import multi_scale_deformable_attn

        sizes = torch.as_tensor([(20, 30), (10, 15)], dtype=torch.long)
        rows = sum((h * w).item() for h, w in sizes)
        value = torch.rand(1, rows, 4, 16) * 0.01
        places = torch.ones(1, 6, 4, 2, 3, 2) * 0.005
        scores = torch.rand(1, 6, 4, 2, 3) + 1e-5
        starts = torch.cat((sizes.new_zeros((1,)), sizes.prod(1).cumsum(0)[:-1]))
        for t in (value, places, scores):
            t.requires_grad_()
        out = multi_scale_deformable_attn(
            value.npu(), sizes.npu(), starts.npu(), places.npu(), scores.npu())
        out.backward(torch.ones_like(out))
        assert all(t.grad is not None for t in (value, places, scores))
        print(tuple(out.shape))
        """,
    "attention-point": """
        import torch, torch_npu
        import mx_driving

        value = torch.rand(1, 600, 4, 16).half().npu()
        sizes, starts = torch.tensor([[20, 30]]).npu(), torch.tensor([0]).npu()
        places, scores = torch.rand(1, 6, 4, 1, 3, 2).npu(), torch.rand(1, 6, 4, 1, 3).npu()
        out = mx_driving.point.npu_multi_scale_deformable_attn_function(
            value, sizes, starts, places, scores)
        assert out.dtype == torch.float16
        print(tuple(out.shape))
        """,
    "geometric": """
        import torch, torch_npu
        from mx_driving import geometric_kernel_attention

        torch.npu.set_device(0)
        levels = 2
        sizes = torch.tensor([6, 4] * levels).reshape(levels, 2)
        rows = sum((h * w) for h, w in sizes)
        value = torch.rand(2, rows, 4, 8).npu()
        places = torch.rand(2, 5, 4, levels, 3, 2)
        places.uniform_(0, 6)
        scores = (torch.rand(2, 5, 4, levels, 3) + 1e-5).npu()
        starts = torch.cat((sizes.new_zeros((1,)), sizes.prod(1).cumsum(0)[:-1]))
        value.requires_grad_()
        scores.requires_grad_()
        out = geometric_kernel_attention(
            value, sizes.int().npu(), starts.int().npu(), places.float().npu(), scores)
        out.backward((torch.rand(2, 5, 32) * 1e-3).npu())
        assert value.grad is not None and scores.grad is not None
        print(tuple(out.shape))
        """,
    "convolution": """
        import torch, torch_npu

        x = torch.rand(2, 8, 9, 9).npu()
        weight, moves = torch.rand(4, 8, 5, 5).npu(), torch.rand(2, 75, 9, 9).npu()
        x.requires_grad = True
        out, cols = torch_npu.npu_deformable_conv2d(
            x, weight, moves, None,
            kernel_size=[5, 5], stride = [1, 1, 1, 1], padding = [2, 2, 2, 2])
        out.sum().backward()
        assert cols.shape == (2, 8, 45, 45)
        again, _ = torch.ops.npu.npu_deformable_conv2d(
            x, weight, moves, None, [5, 5], [1, 1, 1, 1], [2, 2, 2, 2])
        assert torch.equal(again, out)
        print(tuple(out.shape))
        """,
    "layer": """
        import torch, torch_npu
        from torch_npu.contrib.module import DCNv2

        model = DCNv2(8, 4, 3, 2, 1).npu()
        out = model(torch.randn(2, 8, 9, 9, device="npu:0"))
        out.sum().backward()
        print(tuple(out.shape))
        """,
}
PRINTED = {
    "aggregation": "(1, 4, 64)",
    "aggregation-fused": "(1, 4, 64)",
    "attention": "(1, 6, 64)",
    "attention-point": "(1, 6, 64)",
    "geometric": "(2, 5, 32)",
    "convolution": "(2, 4, 9, 9)",
    "layer": "(2, 4, 5, 5)",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPTS[name]))
    before = state()
    ascend.run_script(script)
    assert capsys.readouterr().out == PRINTED[name] + "\n"
    assert state() == before


def test_a_script_sees_what_python_would_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_the_script.py").write_text("word = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch_npu, beside_the_script\n"
        "print(__name__, sys.argv, beside_the_script.word, __file__)\n"
    )
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        ascend.run_script(str(script), ["--size", "3"])
    finally:
        sys.modules.pop("beside_the_script", None)
    expected = f"__main__ {[str(script), '--size', '3']} beside {script}\n"
    assert capsys.readouterr().out == expected
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, main)


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise ValueError('the script')"])
def test_a_script_that_fails_fails_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import torch_npu\n{end}\n")
    before, path = state(), list(sys.path)
    with pytest.raises((SystemExit, ValueError)) as raised:
        ascend.run_script(script, [])
    assert str(raised.value) in ("3", "the script")
    assert state() == before
    assert sys.path == path


@pytest.mark.usefixtures("_installed")
def test_a_script_does_not_undo_an_earlier_install(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch_npu\n")
    ascend.run_script(script)
    assert torch.zeros(1, device="npu").is_npu


def test_a_script_beside_a_real_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import torch_npu\n")
    with pytest.raises(RuntimeError, match=r"^ascend\.install: the real package torch_npu is"):
        ascend.run_script(script)


def test_importing_compat_changes_nothing() -> None:
    code = """
        import sys, torch
        from torch import overrides
        before = set(vars(torch)), set(vars(torch.Tensor)), set(vars(torch.ops))
        from pliant.compat import ascend, mx_driving, torch_npu
        after = set(vars(torch)), set(vars(torch.Tensor)), set(vars(torch.ops)) - {"pliant"}
        assert before == after, [a ^ b for a, b in zip(before, after)]
        assert not overrides._get_current_function_mode_stack()
        assert not {"mx_driving", "torch_npu", "pliant.compat.mx_driving.fused"} & set(sys.modules)
        """
    done = python(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
