"""Publishing (ups/commands/publish.py, ups/report/model_card.py): copies, hubs, and reports on published
weights."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import pytest
from local_server import PlannedHandler, serving
from test_base_selection import make_caches
from test_operator import overrides_of, train

import evaluate
import prepare_cache
import prepare_data
import ups
from ups.commands import predict, publish
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.forecaster import Forecaster
from ups.report.model_card import card
from ups.results import Results, load

RUN = (
    "data.tasks=[burgers1d,darcy2d] task.darcy2d.energy=0.999 operator.train.steps=4 "
    "operator.base_steps=5 operator.model.width=16 operator.model.depth=1 "
    "operator.train.precision='no' operator.train.validate_trajectories=1 "
    "evaluate.max_trajectories=4 evaluate.num_bootstrap=20 evaluate.quality=false"
).split()


def report_of(monkeypatch, *overrides: str, is_drawn: bool = False) -> tuple[int, Results]:
    """(exit status, results) of evaluate.py in this process."""
    arguments = ["--config", str(ROOT / "configs" / "smoke.yaml"), *overrides]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    if not is_drawn:
        monkeypatch.setattr(evaluate.report, "write_report", lambda *_: None)
    status = evaluate.main()
    return status, load(load_config(ROOT / "configs" / "smoke.yaml", overrides).report_dir)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Data, caches and runs/smoke, an operator that a report has judged."""
    root = tmp_path_factory.mktemp("publish")
    make_caches(root, *RUN)
    code, log = train(root, root / "runs", *RUN)
    assert code == 0, log
    with pytest.MonkeyPatch.context() as monkeypatch:
        report_of(monkeypatch, *overrides_of(root, root / "runs", *RUN), is_drawn=True)
    return root


def test_a_report_writes_the_card_of_its_numbers_beside_the_weights(home):
    folder = home / "runs" / "smoke" / "operator"
    text, results = (folder / "README.md").read_text(), load(folder.parent / "report")
    assert text.startswith("---\nlicense: mit\nlibrary_name: ups\n")
    assert "# smoke: the operator, which forecasts" in text
    assert "| burgers1d | u | 64 | 0 to 1 | periodic | 0.0" in text and "Nu 0.05 to 0.1 |" in text
    for name, task in results.tasks.items():
        frames, trajectories = (task.number("", f"num_{key}") for key in ("frames_predicted", "trajectories"))
        assert f"\n| {name} | {frames} | {trajectories} | " in text
        assert error_in_card(text, name) == pytest.approx(task.number("operator", "nrmse"), rel=1e-2), name
    assert "| seed | 0 |" in text and "generate, seed 2022" in text and "gates of this stage passed" in text
    for picture in re.findall(r"\]\((\S+)\)", text.split("## What was measured")[1]):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "images").iterdir())) == 2


def test_a_card_names_the_gates_that_failed_and_a_licence_by_where_data_are_from(home):
    results = load(home / "runs" / "smoke" / "report")
    results.facts["gates"][0] |= {"passed": False, "undecided": False, "reason": "far off"}
    results.facts["training"]["source"] = "user"
    text = card("operator", results, ups.load(home / "runs" / "smoke").tasks, {})
    assert f"Failed: {results.facts['gates'][0]['name']}, far off." in text
    assert "license: other" in text and "their owner decides how the weights may be shared" in text


def test_a_copy_is_all_that_a_forecast_needs(home, tmp_path, monkeypatch):
    run, u0 = home / "runs" / "smoke", np.sin(2 * np.pi * np.arange(64) / 64)[None].astype("float32")
    copy = publish.copy(run, tmp_path / "copy")
    files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert {
        f"operator/{name}" for name in ("config.json", "model.safetensors", "done.json", "README.md")
    } <= files
    assert not [name for name in files if "state" in name or name.endswith((".pt", ".lock"))]
    one, two = (
        ups.load(folder).forecast("burgers1d", u0, {"Nu": 0.05}, num_frames=3) for folder in (run, copy)
    )
    assert np.array_equal(one, two)
    monkeypatch.setattr(
        sys, "argv", ["publish", str(run), str(tmp_path / "again")]
    )  # as make publish calls it
    assert publish.main() == 0 and (tmp_path / "again" / "operator" / "metrics.jsonl").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "again"}


def test_weights_from_elsewhere_reproduce_their_table_where_the_data_are_the_same(
    home, tmp_path, monkeypatch
):
    copy = publish.copy(home / "runs" / "smoke", tmp_path / "pretrained")
    _, there = report_of(monkeypatch, *overrides_of(home, home / "runs", *RUN))
    _, here = report_of(monkeypatch, *overrides_of(home, tmp_path / "runs", *RUN, f"evaluate.weights={copy}"))
    for name, task in there.tasks.items():
        for model in task.models():
            assert here.tasks[name].value(model, "nrmse") == task.value(model, "nrmse"), (name, model)
    assert here.facts["training"] == there.facts["training"] and not (copy / "report").exists()


def test_weights_from_elsewhere_are_judged_on_other_data_in_their_own_codec(home, tmp_path, monkeypatch):
    """Other trajectories have another codec, which the weights do not speak."""
    make_caches(tmp_path, *RUN, "data.seed=7")
    more = overrides_of(
        tmp_path, tmp_path / "runs", *RUN, "data.seed=7", f"evaluate.weights={home / 'runs' / 'smoke'}"
    )
    _, results = report_of(monkeypatch, *more)
    model = ups.load(home / "runs" / "smoke")
    from ups.evaluation.truth import open_truth

    truth = open_truth(load_config(ROOT / "configs" / "smoke.yaml", more), "burgers1d")
    assert not model.operator.heads["burgers1d"].codec.is_same(truth.cache.tokenizer)
    u_pred = model.forecast(
        "burgers1d",
        truth.frames(truth.rows, 0, truth.context),
        truth.cache.parameters[truth.rows],
        num_frames=truth.num_frames,
    )
    u_ref = truth.future(truth.rows)
    error = ((u_pred - u_ref).square().mean(-1) / u_ref.square().mean(-1)).sqrt().mean()
    assert results.tasks["burgers1d"].number("operator", "nrmse") == pytest.approx(
        float(error),
        rel=1e-4,
        abs=1e-7,  # rounding of float32 fields, as the error itself is 2e-4
    )


def error_in_card(text: str, task: str) -> float:
    """nRMSE of a task in the table of a card."""
    row = re.search(rf"^\| {task} \| \d+ \| \d+ \| (\S+) \[", text, re.M)
    return float(row[1].replace("×10⁻", "e-").translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")))


def test_the_published_weights_are_on_new_data_what_their_card_says(tmp_path, monkeypatch):
    """Trajectories that nobody trained on, by README's command; the card is of these weights."""
    path, folder = ROOT / "configs" / "pretrained.yaml", ROOT / "pretrained" / "operator"
    more = [
        "data.tasks=[advection1d,burgers1d]",
        "data.seed=7",
        f"data.root={tmp_path}/data",
        f"cache.root={tmp_path}/cache",
        f"run.root={tmp_path}/runs",
        "task.advection1d.num_trajectories=40",
        "task.burgers1d.num_trajectories=40",
        "evaluate.num_bootstrap=20",
        f"evaluate.weights={ROOT / 'pretrained'}",
    ]
    arguments = ["--config", str(path), *more]
    assert prepare_data.main([*arguments, "--workers", "1"]) == 0 and prepare_cache.main(arguments) == 0
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    monkeypatch.setattr(evaluate.report, "write_report", lambda *_: None)
    evaluate.main()
    found = load(tmp_path / "runs" / "pretrained" / "report")
    text, model = (folder / "README.md").read_text(encoding="utf-8"), ups.load(ROOT / "pretrained")
    assert (
        [*model.tasks]
        == load_config(path).data.tasks
        == re.findall(r"^\| (\w+) \| \d+ \| \d+ \|", text, re.M)
    )
    for name in ("advection1d", "burgers1d"):
        task = found.tasks[name]
        assert task.number("operator", "nrmse") == pytest.approx(error_in_card(text, name), rel=1.0), name
    assert task.number("operator", "nrmse") < 0.5 * task.number("base", "nrmse")


def test_what_is_no_operator_is_not_judged(home, tmp_path, monkeypatch):
    given = overrides_of(home, tmp_path / "runs", *RUN, f"evaluate.weights={tmp_path}")
    with pytest.raises(
        FileNotFoundError,
        match="evaluate.weights leads to .*, which is no finished operator; expected one with done.json, or "
        "its run's folder",
    ):
        report_of(monkeypatch, *given)


def test_a_run_without_card_or_operator_does_not_travel(home, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="holds no finished operator; expected a run's folder, such as runs/small"
    ):
        publish.copy(tmp_path, tmp_path / "copy")
    run = publish.copy(home / "runs" / "smoke", tmp_path / "smoke")
    (run / "operator" / "README.md").unlink()
    with pytest.raises(
        FileNotFoundError,
        match="has no README.md; expected a stage with the card that a report on the test split writes. "
        "Run make report RUN=smoke",
    ):
        publish.copy(run, tmp_path / "copy")


# ---------------------------------------------------------------- a hub


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as pushing and fetching ask for; `files` are what was committed."""

    files: dict[str, bytes] = {}
    protocol_version, sha = "HTTP/1.1", "5" * 40

    def _answer(self, body: bytes | dict | list, **headers: str) -> None:
        body = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": self.sha, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        here = f"http://127.0.0.1:{self.server.server_port}"
        if self.path.endswith("/preupload/main"):
            self._answer(
                {
                    "files": [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in json.loads(sent)["files"]
                    ]
                }
            )
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in sent.splitlines()]
            assert lines[0]["value"]["summary"] == "Weights of smoke"
            self.files.update(
                {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines[1:]}
            )
            self._answer(
                {
                    "success": True,
                    "commitOid": self.sha,
                    "commitUrl": f"{here}/owner/name/commit/{self.sha}",
                    "hookOutput": "",
                }
            )
        else:  # of the repository, of the card's head
            self._answer({"url": f"{here}/owner/name", "errors": [], "warnings": []})

    def do_HEAD(self):
        body = self.files[self.path.split(f"/resolve/{self.sha}/")[1]]
        self._answer(body, ETag=f'"{hashlib.sha256(body).hexdigest()}"')

    def do_GET(self):
        if "/resolve/" in self.path:
            return self.do_HEAD()
        if "/tree/" in self.path:
            return self._answer(
                [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in self.files.items()
                ]
            )
        self._answer(
            {
                "id": "owner/name",
                "modelId": "owner/name",
                "sha": self.sha,
                "tags": [],
                "private": False,
                "siblings": [{"rfilename": name} for name in self.files],
            }
        )

    def log_message(self, *_):
        pass


def use_hub(monkeypatch, tmp_path, address):
    """The environment in which the client asks this hub and no other."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "".join(template[1:]))
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_hub(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(Hub, "files", {})
    yield Hub
    server.shutdown()
    server.server_close()


def test_what_was_pushed_to_a_hub_is_loaded_by_name(home, hub):
    run = home / "runs" / "smoke"
    assert ups.push(run, "owner/name").endswith(f"/owner/name/commit/{hub.sha}")
    assert set(hub.files) == {"README.md", *publish.published_files(run)}
    root = hub.files["README.md"].decode()
    assert "](operator/images/" in root and "](images/" not in root
    hub.files["operator/planted.pt"] = b"never fetched"
    model = ups.load("hf://owner/name")
    assert isinstance(model, Forecaster) and not (model.folder / "operator" / "planted.pt").exists()
    u0 = np.zeros((1, 64), "float32") + 0.3
    one, two = (
        found.forecast("burgers1d", u0, {"Nu": 0.1}, num_frames=2) for found in (model, ups.load(run))
    )
    assert np.array_equal(one, two)


def test_predict_takes_weights_from_a_hub_by_name_and_from_this_machine_when_it_is_gone(
    home, hub, tmp_path, monkeypatch
):
    run = home / "runs" / "smoke"
    ups.push(run, "owner/name")
    [data, *_] = sorted((home / "data" / "burgers1d").glob("*.hdf5"))

    def predicted(name: str, weights: str) -> np.ndarray:
        given = f"--run {weights} --task burgers1d --input {data} --rows 0:2 --output {tmp_path / name}"
        assert predict.main(given.split()) == 0
        with h5py.File(tmp_path / name) as file:
            return file["tensor"][:]

    assert np.array_equal(found := predicted("hub.h5", "hf://owner/name"), predicted("run.h5", str(run)))
    use_hub(monkeypatch, tmp_path, "http://127.0.0.1:9")  # nobody listens there
    assert np.array_equal(predicted("again.h5", "hf://owner/name"), found)
    with pytest.raises(
        FileNotFoundError, match="hf://owner/other is neither on this machine nor on its hub .*; ex"
    ):
        predicted("other.h5", "hf://owner/other")
    assert not (tmp_path / "other.h5").exists()


class BrokenHub(PlannedHandler):
    """A hub that answers every request in the way of its `kind`."""

    def do_GET(self):
        with contextlib.suppress(OSError):  # the client has gone
            getattr(self, self.server.kind)()

    do_POST = do_HEAD = do_GET

    def error(self):
        self.send_error(500)

    def another_json(self):
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"[1]")


@pytest.mark.parametrize("call", ["load", "push"])
@pytest.mark.parametrize("kind", ["nobody", "error", "another_json"])
def test_a_hub_that_is_away_or_broken_is_one_line(tmp_path, monkeypatch, kind, call):
    pytest.importorskip("huggingface_hub")
    with serving(BrokenHub, kind=kind) as server:
        address = "http://127.0.0.1:9" if kind == "nobody" else server.url.removesuffix("/api/1")
        use_hub(monkeypatch, tmp_path, address)
        with pytest.raises(OSError, match="hf://owner/name .*; expected OWNER/NAME .* network") as error:
            ups.load("hf://owner/name") if call == "load" else ups.push(ROOT / "pretrained", "owner/name")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_name_of_a_hub_without_its_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError,
        match="a name that begins with hf:// needs huggingface_hub, which is not installed; "
        "expected it, or a folder. Run pip install huggingface_hub",
    ):
        ups.load("hf://owner/name")


def test_a_mistyped_folder_asks_no_network():
    with pytest.raises(
        FileNotFoundError, match="there is no folder runs/smal; expected a run, such as runs/small"
    ):
        ups.load("runs/smal")
