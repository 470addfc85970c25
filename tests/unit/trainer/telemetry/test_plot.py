"""The picture: drawn for short and long runs, with the metrics that a run has, and its numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from ppojob_trainer.telemetry import MetricsUnreadableError, plot_runs
from ppojob_trainer.telemetry import plot as plot_module
from ppojob_trainer.telemetry.plot import plot
from ppojob_trainer.telemetry.plot_runs import Run

WHOLE = (
    "critic/score/mean",
    "actor/ppo_kl",
    "response_length/mean",
    "timing_s/gen",
    "timing_s/step",
    "pool/a/busy_fraction",
)


def _write(folder: Path, num_steps: int, metrics: tuple[str, ...] = WHOLE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"step": 0, "time": 0.0, "val-core/score/mean": 0.2}]
    for step in range(1, num_steps + 1):
        records.append({"step": step, "time": 1.0 * step, **dict.fromkeys(metrics, 1.0 + math.sin(step) / 2)})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder / "metrics.jsonl"


def _figure(paths: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, labels: tuple[str, ...] = ()) -> Figure:
    """Draw, and return the figure that was saved."""
    saved = []
    original = Figure.savefig

    def keep(figure: Figure, *arguments: object, **options: object) -> None:
        saved.append(figure)
        original(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    plot(paths, tmp_path / "plot.png", labels)
    return saved[0]


def _titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.get_axes()]


@pytest.mark.parametrize("num_steps", [0, 2, 1000])
def test_a_run_of_any_length_is_drawn(tmp_path: Path, num_steps: int) -> None:
    path = _write(tmp_path / "run", num_steps)

    assert plot([path], tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [found.name for found in (tmp_path / "out").iterdir()] == ["plot.png"]


def test_panels_without_data_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = _figure([_write(tmp_path / "run", 5, ("critic/score/mean",))], monkeypatch, tmp_path)

    texts = {axes.get_title(loc="left"): [text.get_text() for text in axes.texts] for axes in figure.get_axes()}
    silent = {title for title, found in texts.items() if "no data" in found}
    assert silent == {
        "KL to the reference",
        "KL of an update",
        "Response length",
        "Gap between trainer and engine",
        "Time per phase",
        "Busy pools",
    }


def test_every_axis_has_its_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = _figure([_write(tmp_path / "run", 5)], monkeypatch, tmp_path)

    assert {axes.get_title(loc="left"): axes.get_ylabel() for axes in figure.get_axes()} == {
        "Reward": "mean score",
        "KL to the reference": "nats per token",
        "KL of an update": "nats per token",
        "Gap between trainer and engine": "difference of probabilities",
        "Response length": "tokens, mean of the step",
        "Time per phase": "seconds per step",
        "Busy pools": "percent of the step",
    }
    assert {axes.get_xlabel() for axes in figure.get_axes()} == {"step"}


def test_several_runs_have_their_phases_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [_write(tmp_path / name, 5) for name in ("serial", "split", "other")]

    figure = _figure(paths, monkeypatch, tmp_path)

    assert [title for title in _titles(figure) if title.startswith("Time")] == [
        "Time per phase: serial",
        "Time per phase: split",
        "Time per phase: other",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["serial", "split", "other"]


def _run(name: str, metric: str, values: dict[int, float]) -> Run:
    steps, numbers = np.array(list(values), dtype=np.float64), np.array(list(values.values()))
    return Run(name, {metric: (steps, numbers)})


def test_runs_of_the_same_name_are_a_mean_and_a_band_over_the_steps_that_all_of_them_have() -> None:
    runs = [_run("ppo", "a", {1: 1.0, 2: 4.0, 3: 9.0}), _run("ppo", "a", {1: 3.0, 2: 0.0}), _run("grpo", "b", {1: 1.0})]
    ppo, grpo = plot_runs.groups_of(runs)

    band = ppo.get("a")

    assert band is not None
    assert (band.steps.tolist(), band.mean.tolist()) == ([1, 2], [2, 2])
    assert (band.low.tolist(), band.high.tolist()) == ([1, 0], [3, 4])
    assert (grpo.name, grpo.get("a")) == ("grpo", None)


@pytest.mark.parametrize("num_steps", [5, 100])
def test_seeds_are_one_line_for_each_algorithm_with_the_kl_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    kl = {"PPO": "actor/reward_kl_penalty", "GRPO": "actor/kl_loss"}
    labels = ("PPO", "PPO", "PPO", "GRPO", "GRPO", "GRPO")
    paths = [_write(tmp_path / f"{i}", num_steps, (*WHOLE, kl[label])) for i, label in enumerate(labels)]

    figure = _figure(paths, monkeypatch, tmp_path, labels)

    axes = {each.get_title(loc="left"): each for each in figure.get_axes()}
    drawn = [line for line in axes["KL to the reference"].lines if len(np.asarray(line.get_xdata()))]
    assert {line.get_label() for line in drawn} == {"in the reward", "in the loss"}
    assert len(drawn) == len(axes["KL to the reference"].collections) == 2, "a line and a band for each algorithm"
    assert [title for title in axes if title.startswith("Time")] == ["Time per phase: PPO", "Time per phase: GRPO"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["PPO: mean and range of 3 runs", "GRPO: mean and range of 3 runs"]


def test_a_comparison_leaves_out_what_no_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [_write(tmp_path / name, 5, ("critic/score/mean",)) for name in ("a", "b")]

    figure = _figure(paths, monkeypatch, tmp_path)

    assert [axes.get_title(loc="left") for axes in figure.get_axes() if axes.get_visible()] == ["Reward"]


def test_no_panel_has_two_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL of an update is a thousandth of the KL to the reference: on one axis it would be a line at zero."""
    metrics = (*WHOLE, "actor/reward_kl_penalty")

    figure = _figure([_write(tmp_path / "run", 5, metrics)], monkeypatch, tmp_path)

    lines = {axes.get_title(loc="left"): len(axes.lines) for axes in figure.get_axes()}
    assert (lines["KL to the reference"], lines["KL of an update"]) == (1, 1)


def test_a_bar_of_several_runs_counts_those_that_had_not_ended() -> None:
    bars = [np.array([1.0]), np.array([2.0])]
    runs = [_run("a", "timing_s/gen", {1: 2.0, 2: 4.0}), _run("a", "timing_s/gen", {1: 4.0})]

    assert plot_module._mean_of_runs(runs, "timing_s/gen", bars).tolist() == [3.0, 4.0]


def test_the_folder_of_a_run_will_do(tmp_path: Path) -> None:
    _write(tmp_path / "run", 2)

    assert plot([tmp_path / "run"], tmp_path / "plot.png").exists()


def test_runs_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    paths = [_write(tmp_path / folder / "run", 2) for folder in ("a", "b")]

    assert plot_runs.names_of(paths) == ["a/run", "b/run"]


def test_a_bar_of_several_steps_has_their_mean_and_counts_absence_as_zero() -> None:
    steps, values = np.array([1.0, 3.0, 4.0]), np.array([2.0, 4.0, 6.0])
    bars = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]

    assert plot_module._mean_within((steps, values), bars).tolist() == [1.0, 5.0]
    assert plot_module._mean_within(None, bars).tolist() == [0.0, 0.0]


def test_phases_stand_in_the_order_of_a_step_and_unknown_ones_last(tmp_path: Path) -> None:
    metrics = ("timing_s/update_actor", "timing_s/mystery", "timing_s/gen", "timing_s/step")
    run = plot_runs.load_runs([_write(tmp_path / "run", 2, metrics)])[0]

    assert plot_runs.phases_of([run]) == ["gen", "update_actor", "mystery"]


def test_no_file_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name at least one"):
        plot([], tmp_path / "plot.png")
    with pytest.raises(FileNotFoundError, match=r"does not exist: name a metrics\.jsonl"):
        plot([tmp_path / "none.jsonl"], tmp_path / "plot.png")


def test_a_file_without_a_record_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()

    with pytest.raises(ValueError, match="no record yet"):
        plot([tmp_path], tmp_path / "plot.png")


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("hello\n")

    with pytest.raises(MetricsUnreadableError, match="line 1, is not a metrics record"):
        plot([tmp_path], tmp_path / "plot.png")
