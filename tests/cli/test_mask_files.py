"""`--mask FILE.npy`: the plan of a boolean matrix, and files that hold none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dash_attn import Causal, explain, flash_attn_func
from dash_attn.cli import explore, mask_files
from dash_attn.cli.main import main
from dash_attn.scheduling import Problem, Schedule
from dash_attn.scheduling.plan import lower

RANDOM = np.random.default_rng(0)
TREE = np.tri(640, dtype=bool) & np.kron(RANDOM.random((10, 10)) < 0.5, np.ones((64, 64), dtype=bool))
MAP = RANDOM.random((8, 6)) < 0.6


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, matrix in (("tree", TREE), ("triangle", np.tri(512, dtype=bool)), ("map", MAP), ("cross", np.ones((128, 384), dtype=bool))):
        np.save(f"{name}.npy", matrix)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], words: str) -> Any:
    assert main(["plan", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def saved(words: str) -> Schedule:
    assert main(["plan", *words.split(), "--save", "schedule.json"]) == 0
    return Schedule.from_json(Path("schedule.json").read_text())


def test_a_matrix_of_tokens_is_planned_as_a_call_plans_it() -> None:
    schedule = saved("--mask tree.npy --heads 2 --schedule auto")
    q = torch.zeros(1, 640, 2, 64)
    orders = {
        name: explain(flash_attn_func, q, q, q, mask=torch.from_numpy(mask)).order_hash
        for name, mask in (("tree", TREE), ("all", TREE | True))
    }
    assert lower(schedule).order_hash == orders["tree"] != orders["all"]
    assert flash_attn_func(q, q, q, mask=torch.from_numpy(TREE), schedule=schedule).shape == q.shape


def test_a_triangle_has_the_order_of_the_causal_mask() -> None:
    orders = [lower(saved(f"--mask {mask} --schedule auto")).order_hash for mask in ("triangle.npy", "causal --seqlen 512")]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("counts", ["--q-tiles 8", "--kv-tiles 6", "--q-tiles 8 --kv-tiles 6"])
def test_a_matrix_of_tiles(capsys: pytest.CaptureFixture[str], counts: str) -> None:
    row = planned(capsys, f"--mask map.npy {counts} --schedule weave")
    assert (row["mask"], row["q_tiles"], row["kv_tiles"], row["tasks"]) == ("map.npy", 8, 6, int(MAP.sum()))
    assert saved(f"--mask map.npy {counts} --schedule weave").problem.kept.tolist() == MAP.tolist()


def test_lengths_are_those_of_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    row = planned(capsys, "--mask cross.npy --schedule weave")
    assert (row["q_tiles"], row["kv_tiles"]) == (2, 3)
    assert row == planned(capsys, "--mask cross.npy --schedule weave --seqlen 128 --kv-seqlen 384")
    assert planned(capsys, "--mask cross.npy --schedule weave --tile-q 32 --tile-kv 64")["q_tiles"] == 4


def test_a_matrix_runs_in_cpu_threads_too(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tree", "cross"):  # with partial blocks, and without
        assert planned(capsys, f"--mask {name}.npy --schedule ascending --measured --device cpu --threads 2")["measured"] > 0


def test_partial_blocks_are_not_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dash_attn.cli import plan
    from dash_attn.tools.calibrate.measured import cpu_device

    monkeypatch.setattr(plan, "choose", lambda arguments: cpu_device(2)._replace(backend="hopper"))
    assert main(["plan", "--mask", "tree.npy", "--measured", "--schedule", "ascending"]) == 2
    assert "matrices of whole 64 x 64 blocks on a GPU, any matrix on the CPU; got tree.npy" in capsys.readouterr().err


BAD: list[tuple[Any, str, str]] = [
    (np.ones((3, 3)), "", "must hold a boolean matrix, one row per query and one column per key, not empty; got float64 of shape (3, 3)"),
    (np.ones((3, 3), dtype=np.uint8), "", "got uint8 of shape (3, 3)"),
    (np.ones((0, 3), dtype=bool), "", "got bool of shape (0, 3)"),
    (np.ones(3, dtype=bool), "", "got bool of shape (3,)"),
    (np.ones((1, 3, 3), dtype=bool), "", "got bool of shape (1, 3, 3)"),
    (np.zeros(3, dtype=[("a", bool)]), "", "must hold a boolean matrix"),
    (b"", "", "bad.npy is no array that numpy.save wrote"),
    (b"0 1\n1 0\n" * 8, "", "bad.npy is no array that numpy.save wrote"),
    (None, "", "--mask: cannot read bad.npy: No such file"),
    (TREE, "--seqlen 641", "--seqlen must be 640, because the mask bad.npy has 640 x 640 elements; got 641"),
    (TREE, "--seqlen 640 --kv-seqlen 64", "--kv-seqlen must be 640, because the mask bad.npy has 640 x 640 elements; got 64"),
    (MAP, "--q-tiles 8 --kv-tiles 8", "--kv-tiles must be 6, because the mask bad.npy has 8 x 6 elements; got 8"),
    (MAP, "--q-tiles 8 --seqlen 8", "--q-tiles cannot be combined with --seqlen"),
    (TREE, "--ranks 2", "--ranks takes a mask by name, because ranks that share a sequence take no matrix; got bad.npy"),
]


@pytest.mark.parametrize(("content", "words", "said"), BAD, ids=[said for _, _, said in BAD])
@pytest.mark.parametrize("command", ["plan", "explore"])
def test_bad_files_are_one_line(command: str, content: Any, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(content, bytes):
        Path("bad.npy").write_bytes(content)
    elif content is not None:
        np.save("bad.npy", content)
    save = ["--save", "page.html"] if command == "explore" else []
    assert main([command, "--mask", "bad.npy", *words.split(), *save]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dash-attn: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_is_cut_off_and_one_with_objects(capsys: pytest.CaptureFixture[str]) -> None:
    Path("cut.npy").write_bytes(Path("tree.npy").read_bytes()[:5000])
    np.save("objects.npy", np.array([[{}]]), allow_pickle=True)
    for name in ("cut", "objects"):
        assert main(["plan", "--mask", f"{name}.npy"]) == 2
        assert f"{name}.npy is no array that numpy.save wrote" in capsys.readouterr().err


def test_more_elements_than_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mask_files, "MOST_ELEMENTS", TREE.size - 1)
    assert main(["plan", "--mask", "tree.npy"]) == 2
    assert "tree.npy may have at most 409,599 elements; got shape (640, 640)" in capsys.readouterr().err


def test_names_are_read_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    Path("causal").write_text("no mask")
    assert planned(capsys, "--mask causal --schedule auto")["mask"] == "causal"
    assert main(["plan", "--mask", "causl"]) == 2
    assert "unknown mask 'causl'; masks are written full, causal" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mask.pt", "masks/first"])
def test_another_kind_of_file_is_told_which_kind_is_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mask", name]) == 2
    assert f"--mask: a matrix is read from FILE.npy, as numpy.save writes it; got {name}" in capsys.readouterr().err


def test_a_file_that_was_read_is_not_read_again() -> None:
    asked = explore.read_question({"mask": "tree.npy"}, {"mask": "tree.npy"})
    mask_files.read_mask_file(asked)
    read = asked.mask
    mask_files.read_mask_file(asked)
    assert asked.mask is read


def test_a_page_shows_the_file_that_the_command_was_started_with_and_no_other(here: Path) -> None:
    assert main(["explore", "--mask", "tree.npy", "--schedule", "auto", "--save", "page.html"]) == 0
    assert "--mask tree.npy --seqlen 640" in Path("page.html").read_text()
    start = {"mask": "tree.npy", "seqlen": "640"}
    answer = explore.answer(start, start)
    (run,) = answer["runs"]
    assert (run["q_tiles"], run["kv_tiles"]) == (10, 5)
    assert answer["command"] == "dash-attn plan --mask tree.npy --seqlen 640"
    assert explore.answer({"mask": str(Causal())}, start)["runs"]
    for name in ("triangle.npy", str(here / "tree.npy"), "/etc/none.npy"):
        with pytest.raises(ValueError, match="masks by name, and the file that the command was started with; got"):
            explore.answer({"mask": name}, start)
    with pytest.raises(ValueError, match="masks by name"):
        explore.answer(start)


def test_what_the_matrix_of_tiles_means_is_a_tile_map() -> None:
    found = saved("--mask map.npy --q-tiles 8 --schedule auto")
    assert found.problem == Problem.from_tiles(MAP, 8, 6)
