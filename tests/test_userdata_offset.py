"""Fields whose mean dominates their variation are counted from an offset: the mean is subtracted in float64,
errors are relative to the variation, and the public interface takes and gives the values of the files."""

import h5py
import numpy as np
import pytest
import torch
from golden_table import base_scores
from user_files import T, X, config_of, overlay, read, section, waves, write

import prepare_data
from ups.commands import predict
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.evaluation.forecast import assess_forecasts
from ups.evaluation.gates import usability_of
from ups.evaluation.truth import open_truth
from ups.forecaster import Forecaster
from ups.models.base_selection import fit_base
from ups.models.head_setup import build_operator
from ups.models.loss import squared_errors
from ups.select import pooled
from ups.tasks import TASKS, Place, get_task, make_user_task
from ups.userdata.offset import DOMINANT, dominant
from ups_solvers import SOLVERS

MEAN, SIZE = 101325.0, 0.01  # sound in air, in Pa


def sound(num=20, frames=T):
    """Waves of a pressure in Pa (num, frames, X), float64."""
    return MEAN + SIZE * waves((num, frames, X)).astype(np.float64)


def assessed(folder, u, **settings):
    """The results of the propagator alone on fields u, its operator and its cache."""
    folder.mkdir(exist_ok=True)
    write(folder / "a.h5", u=u)
    config = config_of(
        folder,
        ["operator.model.width=8", "operator.model.depth=1", "evaluate.num_bootstrap=20"],
        **{"base": ["persistence", "propagator"], **settings},
    )
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    facts, weights = fit_base(cache, 1, 1, 0, torch.device("cpu"))
    facts["description"]["network_weight"] = 0.0
    operator = build_operator({"ks": (facts, weights)}, config.operator.model, "no")
    entry, samples = assess_forecasts(operator, open_truth(config, "ks"), config.evaluate, 0)
    return entry, samples, operator, cache, facts


def test_a_large_mean_costs_no_accuracy_and_errors_are_relative_to_the_variation(tmp_path):
    """Before: the mean was subtracted in float32, which left a quarter of the variation to rounding, and the
    verdict said that the error is 1e-8 of the mean."""
    plain, *_ = assessed(tmp_path / "plain", sound() - MEAN)
    entry, [sample, _], _, cache, facts = assessed(tmp_path / "mean", sound())
    assert entry.facts["offset"] == {"u": MEAN} and plain.facts["offset"] == {}
    assert plain.facts["measure"] == "RMS of the truth"
    for model in ("operator", "persistence"):
        error, expected = (one.number(model, "nrmse") for one in (entry, plain))
        assert error == pytest.approx(expected, rel=0.05, abs=1e-6), model
    assert entry.number("persistence", "nrmse") > 0.1 and entry.number("codec_floor", "nrmse") < 1e-6
    words = usability_of(entry, None)["words"]
    assert words.startswith("Usable: its relative error is ") and "of the RMS of u - 101325" in words
    assert sample["fields"] == ["u - 101325"] and np.abs(sample["u_ref"]).max() < 2 * SIZE  # of figures
    assert base_scores(facts)["persistence"] == pytest.approx(entry.number("persistence", "nrmse"), rel=0.3)


def test_validation_nrmse_of_a_base_is_that_of_the_log_of_training(tmp_path):
    """Of a field with a moderate mean: one was relative to the variation, the other to the field."""
    u = 5 + waves((20, T, X)).astype(np.float64)
    _, _, operator, cache, facts = assessed(tmp_path / "a", u, base=["persistence"])
    rows = cache.rows_by_parameter("val", 64)
    logged = pooled(squared_errors(operator, cache, rows, 1))["base"]
    assert base_scores(facts)["persistence"] == pytest.approx(logged, rel=1e-3)
    persistence = np.sqrt(np.square(u[:, 1:] - u[:, :1]).mean()) / np.sqrt(np.square(u).mean())
    assert base_scores(facts)["persistence"] == pytest.approx(persistence, rel=0.2)


def test_forecasts_take_and_give_values_of_the_file_in_the_precision_of_the_input(tmp_path):
    u = sound()
    _, _, operator, cache, _ = assessed(tmp_path / "a", u)
    model, row = Forecaster(operator), int(cache.split["test"][0])
    u_pred = model.forecast("ks", u[row : row + 1, :1, None], num_frames=T - 1)
    assert u_pred.dtype == np.float64 and u_pred.shape == (1, T - 1, 1, X)
    assert np.sqrt(np.square(u_pred[0, :, 0] - u[row, 1:]).mean()) < 1e-3 * SIZE
    single = model.forecast("ks", u[row : row + 1, :1, None].astype(np.float32), num_frames=T - 1)
    # float32 holds no more of 101325
    assert single.dtype == np.float32 and np.abs(single - u_pred).max() < 0.02
    with pytest.raises(
        ValueError,
        match="was given u from 101325.99 to 101326.01; expected 101324.98 to 101325.02: the range",
    ):
        model.forecast("ks", u[row : row + 1, :1, None] + 1.0, num_frames=1)


def test_predict_writes_values_of_the_file_in_float64(tmp_path, monkeypatch):
    u = sound()
    _, _, operator, cache, _ = assessed(tmp_path / "a", u)
    operator.record = {"model_sha256": "0"}
    monkeypatch.setattr(predict.ups, "load", lambda *_: Forecaster(operator))
    out = tmp_path / "out.h5"
    places = f"--run {tmp_path} --input {tmp_path / 'a' / 'a.h5'} --output {out}"
    predict.main(f"{places} --task ks --rows 0:2 --context 1 --frames 3".split())
    with h5py.File(out) as file:
        assert file["u"].dtype == np.float64
        assert np.sqrt(np.square(file["u"][:] - u[:2, :4]).mean()) < 1e-3 * SIZE


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])
@pytest.mark.parametrize(("ratio", "has_offset"), [(10.0, False), (30.0, True), (-1e7, True)])
def test_whether_the_mean_dominates_does_not_depend_on_units(tmp_path, unit, ratio, has_offset):
    u = waves((6, T, X)).astype(np.float64)
    write(tmp_path / "a.h5", u=unit * (u + ratio * u.std()))
    found = config_of(tmp_path).task["ks"].offset
    assert bool(found) == has_offset
    if has_offset:
        assert abs(found["u"] - unit * ratio * u.std()) < 0.3 * unit * u.std()


def test_fields_without_a_dominant_mean_are_read_as_before(tmp_path):
    for u in (waves(), 3 + waves(), waves().astype(np.float64)):
        write(tmp_path / "a.h5", u=u)
        config, source, values = read(tmp_path)
        assert config.task["ks"].offset == {} and "offset" not in source.task.user_facts
        assert np.array_equal(values[:, :, 0], u.astype(np.float32)) and values.dtype == np.float32


def test_no_field_of_pdebench_is_counted_from_an_offset(tmp_path):
    """Its nRMSE is relative to the truth, mean included; the largest mean over variation is that of shallow
    water."""
    assert not any(task.offsets for task in TASKS.values())
    task = get_task("shallow_water2d")
    h = SOLVERS[task.name].simulate(
        range(6), seed=0, resolution=32, num_frames=6, parameter=None, t_end=task.t_end
    )
    path = write(tmp_path / "h.h5", h=np.asarray(h)[:, :, 0])
    assert dominant([str(path)], [Place("h", ("trajectory", "time", "x", "y"), ("h",))], ["x", "y"]) == {}
    h = np.asarray(h, np.float64)
    assert 0.4 * DOMINANT < abs(h.mean()) / h.std() < 0.6 * DOMINANT


def test_what_varies_by_rounding_alone_is_a_constant(tmp_path):
    flicker = 1 + np.float32(6e-8) * np.random.default_rng(0).integers(-1, 2, (6, T, X))
    write(tmp_path / "a.h5", u=waves(), rho=flicker.astype(np.float32), one=np.ones((6, T, X)))
    axes = ["trajectory", "time", "x"]
    config = config_of(tmp_path, layout={"u": axes, "rho": axes, "one": axes})
    assert config.task["ks"].offset == {}


def test_a_mean_per_trajectory_is_no_dominant_mean(tmp_path):
    """Each file varies little about a mean of its own: the first file alone would say otherwise."""
    for number in range(10):
        write(tmp_path / f"run_{number}.h5", u=waves((1, T, X), number) * 1e-3 + 2.0**number)
    assert config_of(tmp_path).task["ks"].offset == {}


def test_an_offset_may_be_set_and_a_wrong_one_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=sound(6))
    for settings, expected in (({"u": 101000}, {"u": 101000.0}), ({"u": 0}, {}), ({}, {"u": MEAN})):
        assert config_of(tmp_path, offset=settings).task["ks"].offset == expected
    for settings, message in (
        ({"w": 1.0}, ": it names 'w'; expected fields of the layout: u"),
        ({"u": "big"}, ".u is 'big'; expected a finite number"),
        ([1], r" is \[1\]; expected a mapping"),
    ):
        with pytest.raises(ValueError, match=rf"task.ks.offset{message}"):
            config_of(tmp_path, offset=settings)
    with pytest.raises(
        ValueError,
        match=r"task.ks.positive: it names u, whose mean is about 101325.* Leave u out of positive",
    ):
        config_of(tmp_path, positive=["u"])
    assert config_of(tmp_path, positive=["u"], offset={"u": 0}).task["ks"].positive == ["u"]


def test_the_doctor_says_how_much_of_the_variation_is_rounding(tmp_path, capsys):
    for u, settings, expected in (
        (sound(6).astype(np.float32), {}, "% of the variation of u is rounding: its mean 101325 is "),
        (sound(6), {"positive": ["u"], "offset": {"u": 0}}, "and it is trained on in float32"),
        (sound(6), {}, None),
        (waves(), {}, None),
    ):
        write(tmp_path / "a.h5", u=u)
        path = overlay(tmp_path, section(tmp_path, **settings))
        prepare_data.main(["--config", str(path), "--doctor"])
        out = capsys.readouterr().out
        assert (expected or "is rounding") in out if expected else "is rounding" not in out, (settings, out)


def test_a_user_solver_gets_the_values_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "shifting.py").write_text(
        "import numpy as np\nMEANS = []\n\ndef step(u):\n    MEANS.append(u.mean())\n    return u\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "a.h5", u=sound(12))
    config = config_of(tmp_path, base={"solver": "shifting:step"})
    build_cache(config, "ks", progress=False)
    fit_base(open_cache(config, "ks"), 1, 1, 0, torch.device("cpu"))
    import shifting

    assert len(shifting.MEANS) and all(abs(mean - MEAN) < 0.01 for mean in shifting.MEANS)


def test_counted_and_absolute_are_inverse_for_numpy_and_torch():
    facts = {
        "arrays": [{"array": name, "axes": ["trajectory", "time", "x"], "fields": [name]} for name in "pq"],
        "axes": ["x"],
        "boundary": "periodic",
        "domain": [[0, 1]],
        "inputs": [],
        "parameters": {},
        "positive": [],
        "conserved": [],
        "bounded": [],
        "symmetries": [],
        "vector": [],
        "hidden": False,
        "offset": {"q": MEAN},
    }
    task, u = make_user_task("ks", facts), np.stack([waves(), MEAN + waves()], 2).astype(np.float64)
    for fields in (u, torch.from_numpy(u)):
        counted = task.counted(fields, ("p", "q"))
        assert abs(float(counted[:, :, 1].mean())) < 1 and (counted[:, :, 0] == fields[:, :, 0]).all()
        assert (task.absolute(counted, ("p", "q")) == fields).all()
        assert abs(float(fields[:, :, 1].mean()) - MEAN) < 1
    assert task.counted(u, ("p",)) is u and task.measure == "RMS of p, q - 101325"
