"""The GPU benchmark at tiny size on a CPU: methods run, a broken one is a row with an error, tables come from data."""

import _thread
import json
import time
from functools import partial

import pytest
import torch

from benchmarks import cifar10, gpu, gpu_peers, page
from benchmarks.gpu_peers import Job, Setting

TINY = Setting(device="cpu", tiny=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # the peers', and torch's about bfloat16 on a CPU


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def session(out=None, **options):
    return gpu.Session(TINY, 1, out, options.get("limit", 1000.0), options.get("rows", []))


def job(step, micro=2, **options):
    return Job(step=step, micro=micro, **options)


def method(*builds, **options):
    """A method whose variants are these builders."""
    variants = tuple({"micro": 2, "which": i} for i in range(len(builds)))
    return gpu.Method(build=lambda s, micro, which: builds[which](), variants=variants, examples=4, **options)


def fails():
    raise ValueError("no such\n layer")


def row(workload, name, ratio, **more):
    figures = {"images_per_s": 1000 * ratio, "ratio": ratio, "memory_gib": 1.5, "batch": 4096, "micro_batch": 512}
    return {"workload": workload, "method": name, **figures, "views": 16, "gpu": "H200", "torch": "2.11", **more}


def test_methods_run_on_images(tmp_path):
    out = tmp_path / "gpu.json"
    run = session(out)
    names = ["sfumato", "sfumato-origin", "sfumato-dope-multiplicity", "vmap"]
    run.run("wrn-16-4", names, late=False)
    rows = json.loads(out.read_text())
    assert rows == run.finished()
    assert {r["method"] for r in rows} == {"ceiling", *names}
    for r in rows:
        assert "error" not in r, r
        assert r["images_per_s"] > 0
        assert r["ratio"] > 0
        assert r["gpu"]
        assert r["took_s"] > 0
        assert r["torch"] == torch.__version__
    origin = next(r for r in rows if r["method"] == "sfumato-origin")
    assert origin["rounds"] == gpu.CLOSE_ROUNDS
    assert gpu.times(rows, "wrn-16-4", "sfumato-origin", "sfumato") == origin["ratio_to_sfumato"] > 0
    gpu.console_table(rows)
    gpu.markdown(rows)


def test_methods_run_on_sequences():
    pytest.importorskip("transformers", reason="needs the 'models' extra")
    run = session()
    names = ["sfumato", "sfumato-untied", "plain-bf16-untied", "sfumato-dope", "vmap"]
    run.run("gpt2", names, late=False)
    rows = {r["method"]: r for r in run.finished()}
    assert rows.keys() == {"plain-bf16", "ceiling", *names}
    assert "untied" in rows["sfumato-untied"]["note"]
    assert all("error" not in r and r["tokens_per_s"] == pytest.approx(8 * r["images_per_s"]) for r in rows.values())


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("opacus", partial(gpu_peers.opacus_images, standardised=False)),
        ("opacus", partial(gpu_peers.opacus_images, standardised=True)),
        ("opacus", gpu_peers.opacus_ghost_sequences),
        ("opake", partial(gpu_peers.opake_images, standardised=False)),
        ("opake", partial(gpu_peers.opake_images, standardised=True)),
    ],
)
def test_peers_run(package, build):
    pytest.importorskip(package, reason="needs the 'bench' extra")
    made = build(TINY, micro=2)
    assert gpu.rate(made, 4, "cpu") > 0
    assert package in made.note.lower()
    if isinstance(build, partial):
        assert ("with weight standardisation" in made.note) is build.keywords["standardised"]


def test_the_network_written_out_is_ours():
    ours, plain = gpu_peers.our_wide_resnet(TINY), gpu_peers.wide_resnet(TINY, standardised=True)
    weights = {name.replace("first", "stem").replace("body", "blocks"): t for name, t in ours.state_dict().items()}
    plain.load_state_dict({name: weights[name].view_as(t) for name, t in plain.state_dict().items()})
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(plain(ours.pixels(x)), ours(x))


def test_plain_training_lets_cudnn_try_its_algorithms():
    builds = (gpu.ceiling_images, gpu.plain_images, partial(gpu.plain_images, tf32=False))
    assert all(build(TINY, micro=2).autotune for build in builds)


def test_a_broken_method_is_one_row_with_an_error(monkeypatch, tmp_path):
    methods = {"ceiling": method(lambda: job(lambda n: time.sleep(0.001))), "opacus": method(fails)}
    methods["sfumato"] = methods["ceiling"]
    monkeypatch.setitem(gpu.WORKLOADS, "wrn-16-4", methods)
    out = tmp_path / "folder" / "gpu.json"
    run = session(out)
    run.run("wrn-16-4", list(methods), late=False)
    rows = {r["method"]: r for r in json.loads(out.read_text())}
    assert rows["opacus"]["error"] == "ValueError: no such layer"
    assert rows["sfumato"]["images_per_s"] > 0
    gpu.console_table(run.finished())


def test_without_a_reference_there_are_speeds_and_no_ratios(monkeypatch):
    methods = {"ceiling": method(fails), "sfumato": method(lambda: job(lambda n: time.sleep(0.001)))}
    monkeypatch.setitem(gpu.WORKLOADS, "wrn-16-4", methods)
    run = session()
    run.run("wrn-16-4", ["sfumato"], late=False)
    ceiling, ours = run.finished()
    assert ceiling["error"]
    assert ours["images_per_s"] > 0
    assert "ratio" not in ours
    assert "?" in gpu.markdown([ours])


def test_the_fastest_variant_that_works_counts():
    slow, fast = (job(lambda n, s=s: time.sleep(s), note=note) for s, note in ((0.03, "slow"), (0.001, "fast")))
    chosen = gpu.choose(method(fails, lambda: slow, lambda: fast), TINY)
    assert chosen.job.note == "fast"
    assert next(iter(chosen.trials.values())) is None
    assert all(chosen.trials[f"micro=2, which={i}"] > 0 for i in (1, 2))
    with pytest.raises(gpu.NotMeasured, match="no such"):
        gpu.choose(method(fails), TINY)


def test_slow_methods_take_fewer_examples():
    made = gpu.choose(
        gpu.Method(
            build=lambda s, micro: job(lambda n: time.sleep(0.05 * n), views=2), variants=({"micro": 2},), examples=999
        ),
        Setting(device="cpu"),
    )
    assert 2 <= made.examples <= gpu.STEP_S / 0.05
    assert made.examples % 2 == 0


def test_a_method_that_does_not_end_is_ended():
    answer = gpu.attempt(lambda: time.sleep(5), "cpu", 0.05)
    assert answer == {"error": "no result within 0 s"}


def test_no_method_begins_after_the_limit():
    run = session(limit=-1.0)
    run.run("wrn-16-4", ["sfumato"], late=False)
    (only,) = run.finished()
    assert only["error"] == "not measured: no time was left"


def test_a_dead_device_ends_the_process_but_not_the_results(monkeypatch, tmp_path):
    """The command line then goes on in a new process, with the rows on file."""
    dead = []

    def dies():
        dead.append(True)
        raise RuntimeError("illegal memory access")

    def synchronize(device):
        if dead:
            raise RuntimeError("illegal memory access")

    good = method(lambda: job(lambda n: time.sleep(0.001)))
    monkeypatch.setitem(gpu.WORKLOADS, "wrn-16-4", {"ceiling": good, "opacus": method(dies), "vmap": good})
    monkeypatch.setattr(gpu, "_synchronize", synchronize)
    out = tmp_path / "gpu.json"
    with pytest.raises(gpu.BrokenDevice):
        session(out).run("wrn-16-4", ["opacus", "vmap"], late=False)
    dead.clear()
    again = session(out, rows=json.loads(out.read_text()))
    again.run("wrn-16-4", ["opacus", "vmap"], late=False)
    rows = {r["method"]: r for r in again.finished()}
    assert "illegal" in rows["opacus"]["error"]
    assert rows["vmap"]["ratio"] > 0


def test_the_ceiling_of_sequences_is_the_faster_plain_training():
    rows = [row("gpt2", name, ratio) for name, ratio in (("sfumato", 0.7), ("plain-bf16", 1.0))]
    rows.append(row("gpt2", "plain-bf16-compiled", 1.4))
    for given in (rows, gpu.finished(rows)):  # also when it reads its own rows again
        done = {r["method"]: r for r in gpu.finished(given)}
        assert done["ceiling"]["ratio"] == 1
        assert done["sfumato"]["ratio"] == 0.5
        assert done["sfumato"]["ratio_to_plain_bf16"] == 0.7
        assert "compiled" in done["ceiling"]["note"]


def test_untied_sequences_are_judged_by_plain_training_of_the_same_network():
    measured = {"sfumato": 0.7, "plain-bf16": 1.0, "plain-bf16-untied": 1.25, "sfumato-untied": 1.0}
    rows = [row("gpt2", name, ratio) for name, ratio in (measured | {"opacus-ghost": 0.4}).items()]
    rows.append(row("gpt2", "plain-bf16-compiled", 2.0))
    for given in (rows, gpu.finished(rows)):
        done = gpu.finished(given)
        named = {r["method"]: r for r in done}
        assert named["ceiling"]["note"].endswith("plain-bf16-compiled")  # Hugging Face's, not the untied one
        assert named["sfumato-untied"]["ratio"] == 0.5
        assert named["sfumato-untied"]["ratio_to_plain_bf16"] == 0.8
        assert named["opacus-ghost"]["ratio_to_plain_bf16"] == 0.32
        assert named["sfumato"]["ratio_to_plain_bf16"] == 0.7
        goals = {(g.method, g.of): gpu.reached(g, done) for g in gpu.GOALS if g.workload == "gpt2"}
        assert goals == {
            ("sfumato", "plain-bf16"): pytest.approx(0.7),
            ("sfumato-untied", "plain-bf16-untied"): pytest.approx(0.8),
            ("sfumato-untied", "opacus-ghost"): pytest.approx(2.5),
        }


def test_tables_show_goals_notes_and_failures(tmp_path, capsys):
    rows = [row("wrn-16-4", name, ratio) for name, ratio in (("ceiling", 1.0), ("opacus", 0.125), ("vmap", 0.2))]
    rows += [row("wrn-16-4", "sfumato", 0.9, note="noise on the host")]
    rows += [row("wrn-16-4", "sfumato-origin", 0.8, note="given; noise on the host", ratio_to_sfumato=0.99)]
    rows += [{"workload": "wrn-16-4", "method": "opake", "error": "not installed", "gpu": "H200", "torch": "2.11"}]
    stored = tmp_path / "gpu.json"
    stored.write_text(json.dumps(rows))
    gpu.main(["--table", str(stored)])
    text = capsys.readouterr().out
    assert "| sfumato | 900 | 0.90 | 1.5 |" in text
    assert "- sfumato, sfumato-origin: noise on the host." in text
    assert "- opake: not installed." in text
    reached, missed = (line for line in text.splitlines() if "Goals" in line)
    assert "sfumato 0.90 x ceiling (at least 0.85), sfumato 7.20 x opacus (at least 6)" in reached
    assert "sfumato-origin 0.99 x sfumato (at least 0.98)" in reached  # as measured in turns with it
    assert missed == "- **Goals missed**: sfumato 4.50 x vmap (at least 6)."
    assert "gpt2" not in text
    gpu.console_table(rows)


def test_the_headline_is_made_of_the_figures_that_are_there():
    cifar = {"stopped": True}
    rows = [row("wrn-16-4", "sfumato", 0.9), row("wrn-16-4", "opacus", 0.125), row("gpt2", "sfumato", 0.7)]
    text = page.headline(rows, cifar)
    assert "On one H200" in text
    assert "0.90 of the speed of the fastest non-private step: 7.2 times that of Opacus." in text
    assert text.endswith("at 0.70 of the speed of the fastest plain training.")
    rows += [row("gpt2", "sfumato-untied", 0.8), row("gpt2", "opacus-ghost", 0.4)]
    assert page.headline(rows, cifar).endswith("at 2.0 times the speed of its ghost clipping.")
    cifar = {"stopped": False, "test_accuracy": {"last": 50.0, "ema": 61.91}, "steps_taken": 1100, "seconds": 600.0}
    cifar["setting"] = {"epsilon": 2.0, "delta": 1e-5, "batch": 4096, "views": 16}
    assert "61.9% test accuracy after 1100 steps" in page.headline([], cifar)


def test_marked_blocks_are_filled_and_all_else_is_left():
    text = page.filled("before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n")
    assert text.startswith("before\n<!-- gpu -->\nOn one ")
    assert text.endswith(".\n<!-- /gpu -->\nafter\n")
    assert page.filled(text) == text
    assert page.filled("no block") == "no block"
    assert page.filled(page.page()) == page.page()


def test_unknown_methods_are_refused():
    with pytest.raises(SystemExit, match="nonesuch"):
        gpu.main(["--methods", "nonesuch"])


def test_precision_is_set_for_a_step_only():
    seen = []
    made = job(lambda n: seen.append(torch.backends.cudnn.allow_tf32), tf32=False)
    before = torch.backends.cudnn.allow_tf32
    gpu.rate(made, 2, "cpu")
    assert seen == [False]
    assert torch.backends.cudnn.allow_tf32 is before


def test_cifar10_stops_and_resumes(monkeypatch, tmp_path):
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    out = tmp_path / "result.json"
    call = ["--tiny", "--device", "cpu", "--checkpoint", str(tmp_path / "run" / "run.pt"), "--out", str(out)]

    class Interrupted(cifar10.Told):
        def step(self, *arguments):
            answer = super().step(*arguments)
            if self._done == 2:
                _thread.interrupt_main()
            return answer

    with monkeypatch.context() as patch:
        patch.setattr(cifar10, "Told", Interrupted)
        cifar10.main(call)
    stopped = json.loads(out.read_text())
    assert (stopped["stopped"], stopped["step"]) == (True, 2)

    cifar10.main(call)
    result = json.loads(out.read_text())
    assert (result["stopped"], result["steps_taken"], result["steps_lost"]) == (False, 4, 0)
    assert result["test_accuracy"].keys() == {"last", "ema"}
    assert [entry["step"] for entry in result["history"]] == [0, 1, 3, 4]  # it was stopped before it evaluated step 2
    assert all("seconds" in entry and "test_accuracy" in entry for entry in result["history"])
    assert not any("test_ema_seconds" in entry for entry in result["history"])
    assert result["seconds_at_352"] is None  # it has four steps
    assert result["statement"]["epsilon"] <= 2
