"""The README's example: a causal LM on packed, uneven sequences, normalised per token or by a mean of means.

python -m pytest tests/test_worked_example.py -s
"""

import torch
import torch.nn.functional as F

from .harness import CollectiveRecorder, base_config, make_engine

MICRO_STEPS, CONTEXT, WIDTH = 4, 64, 32


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(128, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 128)
    )


def _batches(rank):
    """Four micro-batches of packed sequences; a share of the labels that differs from one to the next counts."""
    generator = torch.Generator().manual_seed(rank)
    for micro_step in range(MICRO_STEPS):
        tokens = torch.randint(32, 127, (2, CONTEXT + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        kept = (8, 100, 30, 3)[micro_step] if rank == 0 else (90, 5, 60, 12)[micro_step]
        labels[torch.rand(labels.shape, generator=generator) * 100 >= kept] = -100
        labels[:, 0] = 101  # no micro-batch is empty
        yield tokens[:, :-1], labels


def train_step(mode):
    """One optimizer step; returns the logged loss, the gradient norm, and the collectives of backward and step."""
    from deepspeed import comm as dist

    model = _model()
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        base_config(
            precision="fp32",
            gradient_accumulation_steps=MICRO_STEPS,
            steps_per_print=1,
            lazy={"token_normalization": {"enabled": mode == "tokens"}},
        ),
    )
    small = 0
    for inputs, labels in _batches(dist.get_rank()):
        logits = engine(inputs).float().flatten(0, 1)
        n = (labels != -100).sum()
        with CollectiveRecorder() as record:
            if mode == "tokens":
                loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
                engine.backward(loss, num_tokens=n)
            else:
                loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100)
                if mode == "means, as users log them":  # the loss and the count, met at every micro-step
                    dist.all_reduce(torch.stack([loss.detach(), n.float()]))
                engine.backward(loss)
            engine.step()
        small += sum(call.numel <= 16 and call.name == "all_reduce" for call in record.calls)
    return engine.last_metrics["train_loss"], float(engine.get_global_grad_norm()), small


def reference():
    """The same numbers on one process, in one backward pass over all tokens of all ranks and micro-steps."""
    model = _model()
    total, tokens = 0.0, 0
    for rank in range(2):
        for inputs, labels in _batches(rank):
            logits = model(inputs).float().flatten(0, 1)
            total = total + F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            tokens += int((labels != -100).sum())
    (total / tokens).backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    return (total / tokens).item(), norm.item()


def test_per_token_equals_one_process_and_a_mean_of_means_does_not(ranks):
    loss, norm = reference()
    tokens = ranks(2).run(train_step, "tokens")[0]
    means = ranks(2).run(train_step, "means, as users log them")[0]
    print(f"\none process: loss {loss:.6f}, gradient norm {norm:.6f}")
    for name, (ours, ours_norm, small) in (("per token", tokens), ("mean of means", means)):
        print(
            f"{name}: loss {ours:.6f} ({ours / loss - 1:+.2e}), norm {ours_norm:.6f} ({ours_norm / norm - 1:+.2e}), "
            f"{small} small all-reduces per optimizer step"
        )
    assert abs(tokens[0] / loss - 1) < 1e-6 and abs(tokens[1] / norm - 1) < 1e-5
    assert abs(means[0] / loss - 1) > 1e-4 and abs(means[1] / norm - 1) > 1e-2
    assert (tokens[2], means[2]) == (2, MICRO_STEPS + 2)  # one pack a step, one report


def counted_by_the_comms_logger(mode, steps=4):
    """Small all-reduces of ``steps`` optimizer steps by DeepSpeed's own comms logger, and the loss of the last."""
    from deepspeed import comm as dist

    model = _model()
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        base_config(
            precision="fp32",
            gradient_accumulation_steps=MICRO_STEPS,
            steps_per_print=steps,
            comms_logger={"enabled": True, "prof_all": True},
            lazy={"token_normalization": {"enabled": mode == "lazy"}},
        ),
    )
    logged = dist.comm.comms_logger.comms_dict
    logged.clear()
    total, count = torch.zeros(2, dtype=torch.float64)
    for _ in range(steps):
        for inputs, labels in _batches(dist.get_rank()):
            logits = engine(inputs).float().flatten(0, 1)
            n = (labels != -100).sum()
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            if mode == "lazy":
                engine.backward(loss, num_tokens=n)
            else:
                pair = torch.stack([loss.detach().double(), n.double()])
                dist.all_reduce(pair[:1])
                dist.all_reduce(pair[1:])
                total, count = total + pair[0], count + pair[1]
                engine.backward(loss / n)
            engine.step()
    small = {nbytes: records[0] for nbytes, records in logged.get("all_reduce", {}).items() if nbytes <= 128}
    return sum(small.values()), engine.last_metrics["train_loss"], (total / count).item() if count else None


def test_collectives_by_the_comms_logger(ranks):
    before = ranks(2).run(counted_by_the_comms_logger, "loss and token count per micro-step")[0]
    after = ranks(2).run(counted_by_the_comms_logger, "lazy")[0]
    print(f"\nsmall all-reduces in 4 optimizer steps of 4 micro-steps: before {before[0]}, after {after[0]}")
    assert before[0] == 4 * (2 * MICRO_STEPS + 1) + 1  # two a micro-step, and what the step and the report take
    assert after[0] == 4 + 1


def one_window(mode):
    return counted_by_the_comms_logger(mode, steps=1)


def test_the_same_loss_as_reduced_at_every_micro_step(ranks):
    before = ranks(2).run(one_window, "loss and token count per micro-step")[0]
    after = ranks(2).run(one_window, "lazy")[0]
    assert abs(after[1] / before[2] - 1) < 1e-6
