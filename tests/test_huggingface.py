"""Hugging Face accelerate and Trainer on our engine.

They own the boundary (`set_gradient_accumulation_boundary`, `step()` only at sync points), set
`steps_per_print` to inf, and Trainer hands over losses that are already divided by the window's tokens.
The functions that run on the ranks import both libraries themselves: only this file's pool pays for it.
"""

import copy
import json
import logging
import os
import types
from unittest import mock

import pytest

from tests.harness import base_config, masters
from tests.launcher import launch
from tests.ranks import RankPool

# Nothing is downloaded, and accelerate looks for a GPU whatever DS_ACCELERATOR says.
ENV = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def _need_libraries():
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def pool(request):
    _need_libraries()
    extensions_dir = request.getfixturevalue("warm_extensions")  # not before it is known to be needed
    with RankPool(2, extensions_dir=extensions_dir, env=ENV) as pool:
        yield pool


# ---- accelerate


GAS = 4
FEATURES = 8


def fresh_state():
    """accelerate's singletons, which outlive a call of the pool, made anew for DeepSpeed on CPUs.

    Left to itself accelerate finds no backend on a machine without GPUs and takes every rank for the only
    one: no error, but all of them train on the same data.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    assert state.num_processes == int(os.environ["WORLD_SIZE"])


def accelerator_and_engine(config, model, *others):
    """A new Accelerator, and what its `prepare` makes of the model and the others."""
    from accelerate import Accelerator, DeepSpeedPlugin

    fresh_state()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    return accelerator, accelerator.prepare(model, *others)


def regression(ranks):
    """A linear model, its data, and a loss for each sample that is unlike every other."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x = torch.randn(2 * GAS * ranks, FEATURES)
    y = torch.linspace(0.5, 4.0, len(x)).unsqueeze(1)
    return model, x, y


def hf_config(lazy, precision="fp32", **over):
    """A config as its users write it. Its "auto" values are theirs to fill, ours must not be in it."""
    return base_config(
        precision=precision,
        lazy=lazy,
        **{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", **over},
    )


def accumulate(lazy, precision, **over):
    """One epoch of eight micro-batches, as accelerate's documentation writes it. -> what is to be right."""
    import torch
    from deepspeed import comm as dist

    import ds_lazyreduce

    ds_lazyreduce.register()
    ranks = dist.get_world_size()
    model, x, y = regression(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=1)
    config = hf_config(lazy, precision, gradient_accumulation_steps=GAS, **over)
    accelerator, (engine, optimizer, loader) = accelerator_and_engine(config, model, optimizer, loader)
    dtype, losses, synced = engine.get_data_types()[0], [], []
    for inputs, targets in loader:
        with accelerator.accumulate(engine):
            loss = torch.nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets)
            accelerator.backward(loss)
            losses.append(loss.item())
            synced.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "synced": synced,
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "masters": masters(engine),
        "last": engine.last_metrics,
        "open": engine.flush_metrics(),
        "report": engine.lazy_reduce_report(),
    }


def one_process(ranks, dtype):
    """The same two optimizer steps without any library: a model in `dtype`, fp32 sums and masters."""
    import torch

    model, x, y = regression(ranks)
    working = copy.deepcopy(model).to(dtype)
    master = {name: p.detach().float().clone() for name, p in working.named_parameters()}
    for window in range(2):
        total = {name: torch.zeros_like(p) for name, p in master.items()}
        for i in range(window * GAS * ranks, (window + 1) * GAS * ranks):
            output = working(x[i : i + 1].to(dtype)).float()
            (torch.nn.functional.mse_loss(output, y[i : i + 1]) / GAS).backward()
            for name, p in working.named_parameters():
                total[name] += p.grad.float()
                p.grad = None
        for name, p in working.named_parameters():
            master[name] -= 0.05 * total[name] / ranks
            p.data.copy_(master[name])
    return master


@pytest.mark.parametrize("precision, reduce_every", [("fp32", 1), ("bf16", 1), ("bf16", "boundary")])
def test_accumulate_counts_every_micro_batch_and_equals_one_process(pool, precision, reduce_every):
    import torch

    lazy = {"deferred_loss": {"interval": 2}, "gradient_partition": {"reduce_every": reduce_every}}
    results = pool.run(accumulate, lazy, precision)
    right = one_process(2, torch.bfloat16 if precision == "bf16" else torch.float32)
    seen = [loss for result in results for loss in result["losses"]]
    assert len(seen) == len(set(seen)) == 16
    for result in results:
        assert result["synced"] == [False, False, False, True] * 2
        assert (result["steps"], result["samples"]) == (2, 16)
        assert result["last"] == {"train_loss": pytest.approx(sum(seen) / 16, rel=1e-6)}
        assert result["open"] == {}  # all of it was in the report
        reductions = 8 if reduce_every == 1 else 2
        assert result["report"]["gradient_collectives"] == reductions * result["report"]["buckets"]
        for name, master in result["masters"].items():
            torch.testing.assert_close(master, right[name], rtol=1e-5, atol=1e-6)


def warnings_of(lazy):
    """What our logger warns of in a run whose user asked for `steps_per_print` 1, and the losses reported."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ds_lazyreduce").addHandler(handler)
    try:
        result = accumulate(lazy, "fp32", steps_per_print=1)
    finally:
        logging.getLogger("ds_lazyreduce").removeHandler(handler)
    mine = [message for message in records if "interval" in message]
    return mine, result["last"], result["open"], result["losses"]


def test_steps_per_print_is_inf_under_accelerate(pool):
    """One warning on one rank, nothing reported by itself, nothing lost."""
    first, second = pool.run(warnings_of, {"gradient_partition": {"kernel": "torch"}})
    assert (len(first[0]), len(second[0])) == (1, 0)
    mean = sum(first[3] + second[3]) / 16
    for _, last, flushed, _ in (first, second):
        assert last == {}
        assert flushed == {"train_loss": pytest.approx(mean, rel=1e-6)}


def test_own_interval_wins_over_inf(pool):
    first, second = pool.run(warnings_of, {"deferred_loss": {"interval": 1}})
    assert first[0] == second[0] == []
    second_window = first[3][GAS:] + second[3][GAS:]
    assert first[1] == second[1] == {"train_loss": pytest.approx(sum(second_window) / 8, rel=1e-6)}


@pytest.mark.parametrize(
    "section, key",
    [
        ({"gradient_partition": {"bucket_size": "auto"}}, "lazy_reduce.gradient_partition.bucket_size"),
        ({"deferred_loss": {"interval": "auto"}}, "lazy_reduce.deferred_loss.interval"),
    ],
)
def test_a_written_auto_of_ours_is_refused_by_accelerate(pool, section, key):
    """accelerate fills every "auto" in the config or raises. Leaving the key out means "auto" to us."""
    for error in pool.run_expect_error(accumulate, section, "fp32"):
        assert error.type == "ValueError"
        assert key in error.message


def unwrap(config_path):
    """-> facts about the engine that accelerate makes of a config file."""
    import deepspeed
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    import ds_lazyreduce

    ds_lazyreduce.register()
    model = torch.nn.Linear(16, 16)
    model.config = types.SimpleNamespace(hidden_size=16)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=3)
    accelerator, (engine, *_) = accelerator_and_engine(config_path, model, optimizer, loader)
    return {
        "stand_in": isinstance(engine, deepspeed.DeepSpeedEngine),
        "stock": isinstance(engine, DeepSpeedEngine),
        "ours": isinstance(engine, ds_lazyreduce.engine.LazyReduceMixin),
        "unwrapped": accelerator.unwrap_model(engine) is model,
        "state_dict": sorted(accelerator.get_state_dict(engine)),
        "clipping": engine.gradient_clipping(),
        "reduce_bucket_size": engine.zero_reduce_bucket_size(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "buckets": engine.lazy_reduce_report()["buckets"],
    }


def test_unwrapping_and_auto_values(pool, tmp_path):
    config = hf_config({"deferred_loss": {"interval": 5}}, gradient_clipping="auto")
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for facts in pool.run(unwrap, str(path)):
        assert facts == {
            "stand_in": True,
            "stock": True,
            "ours": True,
            "unwrapped": True,
            "state_dict": ["bias", "weight"],
            "clipping": 1.0,
            "reduce_bucket_size": 256,  # hidden_size ** 2
            "micro_batch": 3,
            "buckets": 2,  # weight and bias do not share 256 elements
        }


# ---- Trainer


SAMPLES, EPOCHS, MAX_NORM = 12, 2, 1.0  # 6 micro-batches a rank and epoch: windows of 4 and of 2


def tiny_llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


def uneven_samples():
    """Of 16 tokens each, with 1 to 15 of them to be predicted."""
    import torch

    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(SAMPLES):
        ids = torch.randint(0, 64, (16,), generator=generator)
        labels = ids.clone()
        labels[: 1 + (i * 7) % 15] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def make_trainer(ds_config, output_dir, **over):
    from transformers import Trainer, TrainingArguments

    arguments = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": GAS,
        "num_train_epochs": EPOCHS,
        "max_grad_norm": MAX_NORM,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "accelerator_config": {"use_configured_state": True},
        **over,
    }
    fresh_state()
    # Trainer looks for a GPU with bf16; CPUs have it, and use_cpu would turn DeepSpeed off.
    with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True):
        arguments = TrainingArguments(output_dir=output_dir, deepspeed=ds_config, **arguments)
    return Trainer(model=tiny_llama(), args=arguments, train_dataset=uneven_samples())


def trainer_config(lazy, **over):
    return hf_config(lazy, gradient_clipping="auto", bf16={"enabled": "auto"}, **over)


def train(ds_config, output_dir, **over):
    """-> what Trainer logged, the loss that our engine had reported at each log, facts about the engine."""
    from transformers import TrainerCallback

    import ds_lazyreduce

    ds_lazyreduce.register()
    trainer = make_trainer(ds_config, output_dir, **over)
    reported = []

    class Read(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                reported.append(getattr(trainer.model_wrapped, "last_metrics", {}).get("train_loss"))

    trainer.add_callback(Read())
    trainer.train()
    engine, rows = trainer.model_wrapped, [row for row in trainer.state.log_history if "loss" in row]
    return {
        "logged": {name: [row[name] for row in rows] for name in ("loss", "grad_norm")},
        "reported": reported,
        "engine": type(engine).__name__,
        "clipping": engine.gradient_clipping(),
        "reduce_bucket_size": engine.zero_reduce_bucket_size(),
        "masters": masters(engine),
    }


def trainer_in_one_process():
    """Trainer's arithmetic by hand, in fp32: token means over windows, AdamW, clipping."""
    import torch

    model, samples = tiny_llama(), uneven_samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, norms = [], []
    for window in [samples[:8], samples[8:]] * EPOCHS:
        tokens = sum(int((s["labels"][1:] != -100).sum()) for s in window)
        total = 0.0
        for sample in window:
            logits = model(input_ids=sample["input_ids"].unsqueeze(0)).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, sample["labels"][1:], ignore_index=-100, reduction="sum")
            (loss / tokens).backward()
            total += loss.item()
        losses.append(total / tokens)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": losses, "grad_norm": norms, "masters": {n: p.data for n, p in model.named_parameters()}}


LAZY = {"deferred_loss": {"interval": 1}}


def test_trainer_equals_one_process_in_fp32(pool, tmp_path):
    """The absolute check: neither we nor anyone else divides twice, in windows cut short by the epoch too."""
    import torch

    right, _ = pool.run(trainer_in_one_process)
    assert min(right["grad_norm"]) > MAX_NORM  # clipping is at work
    for result in pool.run(train, trainer_config(LAZY), str(tmp_path)):
        assert result["engine"] == "LazyEngine"
        assert result["clipping"] == MAX_NORM
        for name in ("loss", "grad_norm"):
            assert result["logged"][name] == pytest.approx(right[name], rel=1e-5)
        assert result["reported"] == pytest.approx(result["logged"]["loss"], rel=1e-6)
        for name, master in result["masters"].items():
            torch.testing.assert_close(master, right["masters"][name], rtol=1e-4, atol=1e-5)


def test_trainer_in_bf16_keeps_stocks_norms(pool, tmp_path):
    """Against stock with fp32 communication and accumulation: the same bf16 gradients, summed alike."""
    stock = trainer_config(None, communication_data_type="fp32", data_types={"grad_accum_dtype": "fp32"})
    (stock, _) = pool.run(train, stock, str(tmp_path), bf16=True)
    assert (stock["engine"], stock["reported"]) == ("DeepSpeedEngine", [None] * 4)
    for lazy in pool.run(train, trainer_config(LAZY), str(tmp_path), bf16=True):
        assert lazy["engine"] == "LazyEngine"
        for name in ("loss", "grad_norm"):
            assert lazy["logged"][name] == pytest.approx(stock["logged"][name], rel=1e-5)
        assert lazy["reported"] == pytest.approx(lazy["logged"]["loss"], rel=1e-6)


def train_with_logging_steps(ds_config, output_dir):
    result = train(ds_config, output_dir, logging_steps=2)
    return result["logged"]["loss"], result["reported"]


def test_an_interval_of_trainers_logging_steps_reports_trainers_loss(pool, tmp_path):
    config = trainer_config({"deferred_loss": {"interval": 2}})
    for logged, reported in pool.run(train_with_logging_steps, config, str(tmp_path)):
        assert len(logged) == 2
        assert reported == pytest.approx(logged, rel=1e-6)


def test_token_normalization_is_refused_under_trainer(pool, tmp_path):
    """Trainer divides by the window's tokens itself; on top of that it would be done twice."""
    config = trainer_config({"token_normalization": {"enabled": True}, **LAZY})
    for error in pool.run_expect_error(train, config, str(tmp_path)):
        assert error.type == "ValueError"
        assert "token_normalization" in error.message


def save(ds_config, output_dir):
    """Train, save the model, and compare it with the engine's weights. -> the names of the files."""
    import torch
    from transformers import LlamaForCausalLM

    import ds_lazyreduce

    ds_lazyreduce.register()
    trainer = make_trainer(ds_config, output_dir, max_steps=1)
    trainer.train()
    trainer.save_model()
    torch.distributed.barrier()  # rank 0 writes
    saved = LlamaForCausalLM.from_pretrained(output_dir).state_dict()
    for name, weight in trainer.model_wrapped.module.state_dict().items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=0)
    return sorted(os.listdir(output_dir))


def test_save_model(pool, tmp_path):
    for files in pool.run(save, trainer_config(LAZY), str(tmp_path)):
        assert "model.safetensors" in files


# ---- under the launcher


# It registers nothing: that is the shim's part.
SCRIPT = """
import json, torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tests.test_huggingface import fresh_state, tiny_llama, uneven_samples
fresh_state()
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=tiny_llama(), args=args, train_dataset=uneven_samples())
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
report = trainer.model_wrapped.lazy_reduce_report()
with open(f"rank{args.process_index}.json", "w") as file:  # the launcher mixes the ranks' prints up
    json.dump([report["gradient_collectives"] / report["buckets"], losses], file)
torch.distributed.destroy_process_group()  # or gloo's threads may abort the interpreter on its way out
"""


@pytest.mark.timeout(200)
def test_unchanged_trainer_script_under_the_launcher(pool, tmp_path, monkeypatch):
    pool.close()  # two jobs' worth of processes is enough
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(trainer_config(LAZY)))
    arguments = "--output_dir out --deepspeed ds.json --max_steps 1 --logging_steps 1 --report_to none"
    arguments += f" --per_device_train_batch_size 1 --gradient_accumulation_steps {GAS} --save_strategy no"
    arguments = [*arguments.split(), "--accelerator_config", '{"use_configured_state": true}']
    code, stdout, stderr = launch("ds_lazyreduce.run", ["train.py", *arguments], tmp_path, timeout=180)
    assert code == 0, stdout + stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[0] == GAS  # each bucket once in each micro-step
    assert len(first[1]) == 1
