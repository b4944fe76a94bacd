"""Shards deleted as their tensors are written: the output is the same, and the job can be resumed at any moment."""

import json
import os

import pytest
from commands import exit_code

from ggufmill import convert_model
from ggufmill.convert import open_source
from ggufmill.convert.hub import delete_shards
from ggufmill.convert.hub.delete_shards import ShardDeleter
from ggufmill.convert.model_spec import ModelSpec, TensorSpec
from ggufmill.convert.tensor_spec import DraftLayer, DraftLayers
from ggufmill.convert.tensor_transforms import unchanged
from ggufmill.formats import FormatError, PlanError
from ggufmill.jobs.execute import execute
from ggufmill.jobs.preflight import preflight
from ggufmill.quantize.planning import plan_quantize


@pytest.fixture
def folder(tmp_path, write_checkpoint, tiny_llama):
    config, tensors = tiny_llama(num_hidden_layers=6)
    names = sorted(tensors, key=lambda n: (n.startswith(("model.norm", "lm_head")), n))
    third = -(-len(names) // 3)
    dealt = [n for i in range(third) for n in names[i::third]]  # so that each of three shards has a run of the names
    return write_checkpoint(tmp_path / "model", config, {n: tensors[n] for n in dealt}, 3)


def shards(folder):
    return sorted(p.name for p in folder.glob("*.safetensors*") if "index" not in p.name)


def test_delete_source_shards_deletes_all_and_writes_the_same_output(folder, tmp_path):
    assert exit_code("convert", folder, tmp_path / "kept.gguf") == 0
    assert len(shards(folder)) == 3
    assert exit_code("convert", folder, tmp_path / "out.gguf", "--delete-source-shards") == 0
    assert shards(folder) == []
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "kept.gguf").read_bytes()


def test_a_shard_is_deleted_only_after_its_tensors_are_synced(folder, tmp_path):
    source = open_source(folder)
    plan = plan_quantize(source, tmp_path / "out.gguf")
    deleter = ShardDeleter(source, plan)
    needs = {path: set(names) for path, names in deleter._needs.items()}
    assert set().union(*needs.values()) == {o.name for o in plan.outputs}
    synced = []

    def on_finished(done, sync):
        before = [p for p in needs if p.exists()]
        deleter(done, lambda: (sync(), synced.append(len(done))))
        gone = [p for p in before if not p.exists()]
        assert all(needs[p] <= done.keys() for p in gone)
        assert not gone or synced[-1] == len(done)

    execute(plan, threads=2, on_finished=on_finished)
    assert synced
    assert not any(path.exists() for path in needs)


@pytest.mark.parametrize("more", [(), ("--split-max-tensors", 30)])
def test_resume_of_a_complete_job_without_source_shards(folder, tmp_path, capsys, more):
    job = ("convert", folder, tmp_path / "out.gguf", "--delete-source-shards", *more)
    assert exit_code(*job) == 0
    capsys.readouterr()
    assert exit_code(*job, "--resume") == 0
    assert ": finished already, and the shards it was made of are deleted" in capsys.readouterr().out
    assert exit_code(*job, "--resume", "--json") == 0
    files = [file["path"] for file in json.loads(capsys.readouterr().out)["files"]]
    assert files == sorted(map(str, tmp_path.glob("out*.gguf")))
    for other in (("--outtype", "f32"), ("--mla-layout", "ik", "--outtype", "q8_0")):
        assert exit_code(*job, *other, "--resume") == 1
    assert exit_code("quantize", folder, *job[2:], "--custom-q", "attn=q8_0", "--resume") == 1
    capsys.readouterr()
    for path in tmp_path.glob("out*.gguf"):
        os.utime(path, ns=(0, 0))
    assert exit_code(*job, "--resume") == 1
    assert "3 of 3 shards are missing" in capsys.readouterr().err
    for path in tmp_path.glob("out*.gguf"):
        path.unlink()
    assert exit_code(*job, "--resume") == 1
    assert "3 of 3 shards are missing" in capsys.readouterr().err


def test_a_complete_job_is_not_taken_for_one_with_other_adapters(folder, tmp_path):
    pytest.importorskip("safetensors")
    from adapters import random_factors, write_adapter

    factors = random_factors({"model.layers.1.self_attn.q_proj": (32, 32)})
    adapter = write_adapter(tmp_path / "adapter", factors)
    job = ("convert", folder, tmp_path / "out.gguf", "--delete-source-shards")
    assert exit_code(*job, "--lora", adapter) == 0
    assert shards(folder) == []
    assert exit_code(*job, "--lora", adapter, "--resume") == 0
    assert exit_code(*job, "--resume") == 1
    assert exit_code(*job, "--lora", f"{adapter}=0.5", "--resume") == 1
    write_adapter(tmp_path / "adapter", random_factors({"model.layers.1.self_attn.q_proj": (32, 32)}, seed=8))
    assert exit_code(*job, "--lora", adapter, "--resume") == 1


def test_output_of_another_model_does_not_count_as_complete(folder, tmp_path, tiny_llama, write_checkpoint, capsys):
    other = write_checkpoint(tmp_path / "other", *tiny_llama(num_hidden_layers=2))
    assert exit_code("convert", folder, tmp_path / "gone.gguf", "--delete-source-shards") == 0
    assert exit_code("convert", other, tmp_path / "out.gguf") == 0
    assert exit_code("convert", folder, tmp_path / "out.gguf", "--delete-source-shards", "--resume") == 1
    assert "3 of 3 shards are missing" in capsys.readouterr().err


def test_resume_removes_records_left_by_a_kill_at_the_end(folder, tmp_path, monkeypatch, capsys):
    job = ("convert", folder, tmp_path / "out.gguf", "--delete-source-shards")
    with monkeypatch.context() as patch:
        patch.setattr(ShardDeleter, "close", lambda self: None)
        assert exit_code(*job) == 0
    assert len(shards(folder)) == 3
    assert exit_code(*job, "--resume") == 0
    assert "finished already" in capsys.readouterr().out
    assert shards(folder) == []


def test_resume_after_a_kill_between_the_removals_of_records(folder, tmp_path, monkeypatch, capsys):
    job = ("convert", folder, tmp_path / "out.gguf", "--delete-source-shards")
    with monkeypatch.context() as patch:
        patch.setattr(ShardDeleter, "close", lambda self: self._records[0].unlink())
        assert exit_code(*job) == 0
    assert len(shards(folder)) == 2
    written = (tmp_path / "out.gguf").read_bytes()
    assert exit_code(*job, "--resume") == 0
    assert "finished already" in capsys.readouterr().out
    assert shards(folder) == []
    assert (tmp_path / "out.gguf").read_bytes() == written


@pytest.mark.parametrize("after", [3, 20, 40, 57])
def test_resume_after_interruption(folder, tmp_path, after, monkeypatch):
    execute(plan_quantize(open_source(folder), tmp_path / "uninterrupted.gguf", version="x"))
    source = open_source(folder)
    plan = plan_quantize(source, tmp_path / "out.gguf", version="x")
    deleter, count = ShardDeleter(source, plan), [0]

    def on_finished(done, sync):
        deleter(done, sync)
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(plan, threads=1, on_finished=on_finished)
    remaining = list(folder.glob("*.safetensors"))
    reopened = open_source(folder)
    resumed_plan = plan_quantize(reopened, tmp_path / "out.gguf", version="x")
    assert resumed_plan.fingerprint == plan.fingerprint
    second_deleter = ShardDeleter(reopened, resumed_plan)
    execute(resumed_plan, threads=2, resume=True, on_finished=second_deleter)
    second_deleter.close()
    assert shards(folder) == []
    assert len(remaining) == {3: 3, 20: 2, 40: 1, 57: 0}[after]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "uninterrupted.gguf").read_bytes()


def test_deleted_shards_cannot_be_used_by_another_job(folder, tmp_path, capsys):
    source = open_source(folder)
    plan = plan_quantize(source, tmp_path / "out.gguf")
    deleter, count = ShardDeleter(source, plan), [0]

    def on_finished(done, sync):
        deleter(done, sync)
        count[0] += 1
        if count[0] > 45:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(plan, threads=1, on_finished=on_finished)
    assert exit_code("convert", folder, tmp_path / "other.gguf") == 1
    assert "was deleted by a job that used it" in capsys.readouterr().err
    assert not (tmp_path / "other.gguf").exists()
    gone = next(t for t in open_source(folder).tensors.values() if not t.files[0].exists())
    with pytest.raises(FormatError, match="was deleted when its tensors had been written"):
        gone.read(0, 1)
    with pytest.raises(PlanError):
        preflight(plan)


def test_refused_sources(folder, tmp_path):
    def new_deleter():
        source = open_source(folder)
        return ShardDeleter(source, plan_quantize(source, tmp_path / "o.gguf"))

    first = folder / "model-00001-of-00003.safetensors"
    os.link(first, tmp_path / "second name")
    with pytest.raises(PlanError, match="another name too"):
        new_deleter()
    (tmp_path / "second name").unlink()
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlanError, match="is a link"):
        new_deleter()
    first.unlink()
    (tmp_path / "elsewhere").rename(first)
    source = open_source(folder)
    plan = plan_quantize(source, tmp_path / "o.gguf")
    next(iter(source.tensors.values())).read(0, 1)
    with pytest.raises(PlanError, match="the plan depends on tensors in it"):
        ShardDeleter(source, plan)
    execute(plan)
    model = open_source(tmp_path / "o.gguf")
    with pytest.raises(PlanError, match="only the shards of a checkpoint folder"):
        ShardDeleter(model, plan_quantize(model, tmp_path / "p.gguf"))


def test_needed_bytes_counts_deleted_shards_as_free(folder, tmp_path):
    source = open_source(folder)
    plan = plan_quantize(source, tmp_path / "o.gguf")
    needed = ShardDeleter(source, plan).needed_bytes()
    assert plan.file_bytes / 4 < needed <= plan.file_bytes
    assert all(path.exists() for path in source.shards)


def test_needed_bytes_leaves_out_what_exists(folder, tmp_path):
    source = open_source(folder)
    plan = plan_quantize(source, tmp_path / "o.gguf", split_max_tensors=4)
    assert ShardDeleter(source, plan, range(1, len(plan.files))).needed_bytes() == plan.files[0].nbytes
    assert ShardDeleter(source, plan, range(len(plan.files))).needed_bytes() == 0


def test_a_dry_run_says_the_same(folder, tmp_path):
    planned = convert_model(folder, tmp_path / "o.gguf", delete_source_shards=True, dry_run=True)
    source = open_source(folder)
    assert planned.forecast.disk_needed == ShardDeleter(source, planned.plan).needed_bytes() < planned.plan.file_bytes


def test_the_tensors_of_a_finished_output_with_draft_layers():
    def specs(*names):
        return tuple(TensorSpec(name, (name,), (2, 2), unchanged) for name in names)

    layers = (DraftLayer("a.", specs("b.eh", "b.q"), specs("b.head")), DraftLayer("c.", specs("c.eh")))
    model = ModelSpec("test", {}, list(specs("x", "y")), 2, draft=DraftLayers(layers, ("a.", "c.")))
    names = {"x", "y", "b.eh", "b.q", "b.head"}
    expected = [{"x", "y"}, names, names | {"c.eh"}]
    assert delete_shards._possible_tensors(model, names) == expected
    assert delete_shards._possible_tensors(model, names - {"b.head"})[1] == names - {"b.head"}
