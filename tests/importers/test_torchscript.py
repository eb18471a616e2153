"""TorchScript modules as graphs: files, control flow, lists, state, dynamic sizes, wrong and hostile files."""

import io
import pickle
import warnings
import zipfile

import numpy as np
import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

torch = pytest.importorskip("torch")

import max.torch  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession, TorchInputSpec  # noqa: E402
from max.importers.errors import ImportFailure, ModelFileError, error_line  # noqa: E402
from max.importers.torch.script import walk  # noqa: E402
from max.importers.torch.script.program import ScriptProgram  # noqa: E402


class Many(torch.nn.Module):
    """Loops, branches, lists, dictionaries, texts, tuples, optional values, a class of its own."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("scale", torch.tensor(1.5))
        self.factor = 2.0
        self.names = ["a", "b"]

    def helper(self, x, twice: bool = False):
        return x * 2 if twice else x

    def forward(self, x, mode: str = "a", count: int = 3):
        parts: list[torch.Tensor] = []
        found: dict[str, torch.Tensor] = {}
        total = 0
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + i
            parts.append(x)
            total += x.size(0)
        while total > 4:
            total -= 3
        for name in self.names:
            if name == mode:
                found[name] = self.helper(x, twice=True)
            else:
                found[name] = x.sum(-1, keepdim=True).expand_as(x)
        y = torch.stack(parts)[1:].mean(0) + found[mode] * self.scale
        if x.dim() != 2 or x.shape[1] < 3:
            raise ValueError(f"the shape is {x.shape}")
        left, right = y.chunk(2, dim=1)
        last = parts[-1]
        for _ in range(count):
            last = last * 0.5
        z = torch.zeros([x.shape[0], 2], dtype=torch.float32) + total
        return left.to(torch.float64), torch.cat([right, last, z], 1), last.argmax(1)


def close(results, expected):
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        got = got if isinstance(got, torch.Tensor) else torch.from_dlpack(got)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [(), ("b",), ("a", 0), ("b", 5)])
def test_control_flow_follows_what_is_known(arguments):
    script = torch.jit.script(Many().eval())
    x = torch.rand(4, 6)
    with torch.no_grad():
        program = ScriptProgram(script)
        full = [*arguments, *program.defaults[1 + len(arguments) :]]
        result, _ = program((x, *full), ())
        close(result, script(x, *arguments))
    graph = max.torch.from_script(script, [x, *arguments])
    close(InferenceSession().load(graph).execute(x), script(x, *arguments))


@pytest.mark.parametrize("suffix", [".pt", ".torchscript"])
def test_files_are_loaded_with_input_specs(tmp_path, suffix):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 8)
            self.conv = torch.nn.Conv1d(8, 5, 3, padding=1)

        def forward(self, ids, mask):
            x = self.embedding(ids) * mask.unsqueeze(-1)
            y = self.conv(x.transpose(1, 2))
            return {"mean": y.mean(-1), "size": y * y.size(2)}

    model = Net().eval()
    ids, mask = torch.randint(0, 11, (2, 7)), torch.rand(2, 7)
    path = tmp_path / f"net{suffix}"
    torch.jit.script(model).save(path)
    specs = [TorchInputSpec(["batch", "n"], DType.int64), TorchInputSpec(["batch", "n"])]
    loaded = InferenceSession().load(path, input_specs=specs)
    for shape in ((2, 7), (3, 5)):
        ids, mask = torch.randint(0, 11, shape), torch.rand(shape)
        close(loaded.execute(ids, mask), list(model(ids, mask).values()))
    with pytest.raises(ImportFailure, match="does not declare its inputs"):
        InferenceSession().load(path)
    with pytest.raises(ImportFailure, match=r"takes \(ids: Tensor, mask: Tensor\)"):
        InferenceSession().load(path, input_specs=specs[:1])


def test_traced_modules():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(5, 6, batch_first=True)
            self.norm = torch.nn.LayerNorm(6)

        def forward(self, x):
            y, _ = self.gru(x)
            return self.norm(y).reshape(y.size(0), -1)[:, : y.size(1) // 2], x.float()

    model = Net().eval()
    x = torch.rand(2, 4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(model, (x,))
    graph = max.torch.from_script(script, [TorchInputSpec([2, 4, 5])])
    close(InferenceSession().load(graph).execute(x), model(x))


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.memory = torch.zeros(0)
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x, weight: float):
        if self.memory.numel() == 0:
            self.memory = torch.zeros_like(x)
        self.memory = self.memory * weight + self.inner(x)
        self.calls = self.calls + 1
        return self.memory * self.calls, x.shape[0], None

    @torch.jit.export
    def reset(self):
        self.memory = torch.zeros(0)
        self.calls = 0


def test_a_module_keeps_its_state(tmp_path):
    script = torch.jit.script(Counting().eval())
    script.save(tmp_path / "c.jit")
    model = max.torch.ScriptedModule(tmp_path / "c.jit")
    x = torch.rand(2, 3)
    with torch.no_grad():
        for step in range(5):
            got, want = model(x + step, 0.5), script(x + step, 0.5)
            close(got[:1], want[:1])
            assert got[1:] == want[1:] == (2, None)
        model.reset()
        script.reset()
        close(model(x, 0.25)[:1], script(x, 0.25)[:1])
    graph = max.torch.from_script(torch.jit.script(Counting().eval()), [x, 0.5])
    result = InferenceSession().load(graph).execute(x, np.zeros(0, np.float32))
    # the result, the size as a number, and the new state
    assert [list(r.shape) for r in result] == [[2, 3], [], [2, 3]]


class Numbers(torch.nn.Module):
    """Numbers of each kind, whose types decide what the result is."""

    def forward(self, x, factor: float, count: int, flags: list[bool], shift: float | None = None):
        y = x * factor if flags[0] else x * count
        return y if shift is None else y + shift


def test_numbers_have_the_declared_types():
    script = torch.jit.script(Numbers())
    module = max.torch.ScriptedModule(script)
    x = torch.tensor([3, -2])
    for arguments in [
        (2, 1, [True]), (2.5, 1, [1]), (0.0, 1, [True]), (-0.0, 1, [True]), (2, True, [False]), (2.0, 3, [0], 1),
        (2.0, 3, [False], 1.5),
    ]:  # fmt: skip
        expected = script(x, *arguments)
        found = module(x, *arguments)
        assert found.dtype is expected.dtype
        assert found.tolist() == expected.tolist()
        assert torch.equal(torch.signbit(found), torch.signbit(expected))


def test_errors_are_told_in_a_line():
    assert error_line(ValueError("\n a thing\nand more")) == "ValueError: a thing"
    assert error_line(KeyError()) == "KeyError: no message"
    assert error_line(RuntimeError("x" * 1000)) == f"RuntimeError: {'x' * 300}"


def test_data_that_decides_is_an_error():
    @torch.jit.script
    def choose(x):
        if bool(x.sum() > 0):
            return x * 2
        return x - 1

    class Wrap(torch.nn.Module):
        def forward(self, x):
            return choose(x)

    with pytest.raises(ImportFailure, match="cannot be traced"):
        max.torch.from_script(torch.jit.script(Wrap()), [torch.rand(3)])


def test_endless_loops_end(monkeypatch):
    monkeypatch.setattr(walk, "_MOST_STEPS", 10_000)

    class Loop(torch.nn.Module):
        def forward(self, x):
            n = 0
            while n >= 0:
                n += 1
            return x * n

    with pytest.raises(ModelFileError, match="executes more than"):
        ScriptProgram(torch.jit.script(Loop()))((torch.rand(2),), ())


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle was run')",))


def exported(tmp_path, function=lambda x: x + x.shape[0]):
    class Net(torch.nn.Module):
        def forward(self, x):
            return function(x)

    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(Net(), (torch.rand(3, 2),), dynamic_shapes=({0: batch},))
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    return path


def rewritten(path, change):
    """The archive with other entries: the change gets names and bytes, and returns them."""
    data = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(data, "w") as new:
        for info in old.infolist():
            name, content = change(info.filename, old.read(info))
            new.writestr(name, content)
    path.write_bytes(data.getvalue())


def test_exported_programs_are_loaded(tmp_path):
    model = InferenceSession().load(exported(tmp_path))
    for size in (3, 5):
        x = torch.rand(size, 2)
        close(model.execute(x), [x + size])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"torch.ops.aten.add.Tensor", b"torch.os.system", "which is no op"),
        (b"torch.ops.aten.add.Tensor", b"torch.ops.load_library", "which is no op"),
        (b"torch.ops.aten.add.Tensor", b"_operator.attrgetter", "which is no op"),
        (b"torch.ops.aten.add.Tensor", b"torch.ops.__loader__.get_data", "which is no op"),
        (b"Symbol('", b"__import__('os').system('", "no expression of sizes"),
        (b"Symbol('", b"[x for x in ().__class__] + Symbol('", "no expression of sizes"),
        (b"positive=True, integer=True)", b"positive=True)**9**9**9", "powers of sizes"),
    ],
)
def test_a_program_calls_ops_only(tmp_path, old, new, said):
    path = exported(tmp_path)
    rewritten(path, lambda name, data: (name, data.replace(old, new)))
    with pytest.raises(ModelFileError, match=said):
        InferenceSession().load(path)


def test_pickles_are_not_run(tmp_path):
    path = exported(tmp_path)
    evil = pickle.dumps(Evil())
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)

    def change(name, data):
        if "sample_inputs" in name:
            data = buffer.getvalue()
        return name, data

    rewritten(path, change)
    with pytest.raises(ModelFileError, match="cannot be read"):
        InferenceSession().load(path)
    for name in ("opaque_obj_0", "custom_obj_0"):
        path = exported(tmp_path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"net/data/constants/{name}", evil)
        with pytest.raises(ModelFileError, match="only unpickling can make"):
            InferenceSession().load(path)
    torch.save(Evil(), tmp_path / "weights.pt")
    with pytest.raises(ModelFileError, match="which are no program"):
        InferenceSession().load(tmp_path / "weights.pt")


@pytest.mark.parametrize("kind", ["program", "script"])
def test_damaged_archives(tmp_path, kind):
    path = exported(tmp_path)
    if kind == "script":
        path = tmp_path / "net.pt"
        torch.jit.script(Many().eval()).save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(24):
        data = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            start = int(rng.integers(0, len(data)))
            data[start : start + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(0, 9)))
        path.write_bytes(bytes(data[: int(rng.integers(1, len(data) + 1))]))
        try:
            InferenceSession().load(
                path, input_specs=[TorchInputSpec([3, 6 if kind == "script" else 2])]
            )
        except (ImportFailure, ModelFileError):
            pass


def test_archives_that_unpack_to_much_are_refused(tmp_path):
    path = tmp_path / "bomb.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/models/model.json", b" " * (64 << 20))
    with pytest.raises(ModelFileError, match="unpacks to"):
        InferenceSession().load(path)


class Two(torch.nn.Module):
    def forward(self, left, right):
        return left @ right, left.sum()


def test_the_api_of_2023_runs_torch_files(tmp_path):
    from modular import engine

    torch.jit.script(Two()).save(tmp_path / "two.pt")
    x, y = np.random.rand(2, 3).astype(np.float32), np.random.rand(3, 4).astype(np.float32)
    options = engine.TorchLoadOptions([TorchInputSpec(["n", 3]), TorchInputSpec([3, 4])])
    session = engine.InferenceSession()
    model = session.load(tmp_path / "two.pt", options)
    assert [(s.name, s.shape) for s in model.input_metadata] == [
        ("left", [None, 3]), ("right", [3, 4]),
    ]  # fmt: skip
    results = model.execute(left=x, right=y)
    np.testing.assert_allclose(results["result0"], x @ y, 1e-5)
    assert model.output_metadata[0].dtype is engine.DType.float32
    program = torch.export.export(Two(), (torch.from_numpy(x), torch.from_numpy(y)))
    torch.export.save(program, tmp_path / "two.pt2")
    model = session.load(tmp_path / "two.pt2")
    np.testing.assert_allclose(model.execute(left=x, right=y)["result1"], x.sum(), 1e-5)
    with pytest.raises(RuntimeError, match="does not declare its inputs"):
        session.load(tmp_path / "two.pt")
    with pytest.raises(RuntimeError, match="without saved_model.pb"):
        session.load(tmp_path)


def test_the_command_saves_torch_files_as_graphs(tmp_path):
    from click.testing import CliRunner

    from max.entrypoints.cli.imported import import_file

    torch.jit.script(Two()).save(tmp_path / "two.pt")
    target = str(tmp_path / "two.mo")
    shapes = [
        "--shape",
        "left=n,3",
        "--shape",
        "right=3,2",
        "--type",
        "left=float64",
        "--type",
        "right=float64",
    ]
    done = CliRunner().invoke(import_file, [str(tmp_path / "two.pt"), "-o", target, *shapes])
    assert done.exit_code == 0, done.output
    x, y = np.random.rand(4, 3), np.random.rand(3, 2)
    result = InferenceSession().load(target).execute(x, y)
    np.testing.assert_allclose(result[0].to_numpy(), x @ y, 1e-12)
