"""The GPU benchmark at tiny size on a CPU: methods run, a broken one is a row with an error, tables come from data."""

import _thread
import json
import time

import pytest
import torch

from benchmarks import cifar10, gpu, gpu_peers
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
    return gpu.Session(TINY, 1, out, options.get("limit", 100.0), options.get("rows", []))


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
    names = ["sfumato", "sfumato-portable", "sfumato-dope", "sfumato-dope-multiplicity", "vmap"]
    run.run("wrn-16-4", names, late=False)
    rows = json.loads(out.read_text())
    assert rows == run.finished()
    assert {r["method"] for r in rows} == {"ceiling", *names}
    for r in rows:
        assert "error" not in r, r
        assert r["images_per_s"] > 0
        assert r["ratio"] > 0
        assert r["gpu"]
        assert r["torch"] == torch.__version__
    gpu.console_table(rows)
    gpu.markdown(rows)


def test_methods_run_on_sequences():
    pytest.importorskip("transformers", reason="needs the 'models' extra")
    run = session()
    run.run("gpt2", ["sfumato", "sfumato-dope", "vmap"], late=False)
    rows = {r["method"]: r for r in run.finished()}
    assert rows.keys() == {"plain-bf16", "ceiling", "sfumato", "sfumato-dope", "vmap"}
    assert all("error" not in r and r["tokens_per_s"] == pytest.approx(8 * r["images_per_s"]) for r in rows.values())


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("opacus", gpu_peers.opacus_images),
        ("opacus", gpu_peers.opacus_ghost_sequences),
        ("opake", gpu_peers.opake_images),
    ],
)
def test_peers_run(package, build):
    pytest.importorskip(package, reason="needs the 'bench' extra")
    made = build(TINY, micro=2)
    assert gpu.rate(made, 4, "cpu") > 0
    assert package in made.note.lower()


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


def test_tables_show_goals_notes_and_failures(tmp_path, capsys):
    rows = [row("wrn-16-4", name, ratio) for name, ratio in (("ceiling", 1.0), ("opacus", 0.125), ("vmap", 0.2))]
    rows += [row("wrn-16-4", "sfumato", 0.9, note="noise on the host")]
    rows += [{"workload": "wrn-16-4", "method": "opake", "error": "not installed", "gpu": "H200", "torch": "2.11"}]
    stored = tmp_path / "gpu.json"
    stored.write_text(json.dumps(rows))
    gpu.main(["--table", str(stored)])
    text = capsys.readouterr().out
    assert "| sfumato (1) | 900 | 0.90 | 1.5 | 4096 x 16 (512) |" in text
    assert "1. sfumato: noise on the host." in text
    assert "2. opake: not installed." in text
    assert "| wrn-16-4: sfumato at least 0.85 x ceiling | 0.90 | reached |" in text
    assert "| wrn-16-4: sfumato at least 6 x opacus | 7.20 | reached |" in text
    assert "| wrn-16-4: sfumato at least 6 x vmap | 4.50 | **missed** |" in text
    assert "| wrn-16-4: sfumato-dope at least 0.98 x sfumato | - |  |" in text
    assert "gpt2" not in text
    gpu.console_table(rows)


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
    assert [entry["step"] for entry in result["history"]] == [1, 3, 4]  # it was stopped before it evaluated step 2
    assert all("seconds" in entry and "test_accuracy" in entry for entry in result["history"])
    assert result["statement"]["epsilon"] <= 2
