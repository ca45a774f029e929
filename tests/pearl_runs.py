"""What the tests of both PEARL scripts share: small replays and small runs."""

import contextlib
import dataclasses
import io
import json
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

T = 4
POINT = SimpleNamespace(horizon=T, obs_dim=2, action_dim=2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


GOALS = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])


def replay(module, cls="ReplayBuffer", episodes=3, capacity=10, file=None):
    """Episodes of two tasks, each along a line of its own: at step t the point is at (t, 100 task + episode)."""
    rb, both = getattr(module, cls)(2, capacity, POINT, torch.device("cpu")), torch.tensor([0, 1])
    for episode in range(episodes):
        obs = torch.stack([torch.arange(T + 1.0).expand(2, -1), torch.tensor([[0.0], [100.0]]).expand(-1, T + 1)], -1)
        obs[..., 1] += episode
        rb.add(both, obs, obs[:, 1:] / 1000, torch.tensor([episode == 1, False]))
        if file:
            rb.file(both, file, generator(episode))
    return rb


def draw(module, rb, relabel, seed=0, **changes):
    args = dataclasses.replace(module.Args(context_size=200, batch_size=300), **changes)
    return module.sample(rb, torch.tensor([0, 1]), GOALS, torch.tensor(relabel), args, generator(seed))


def lines(obs, slot):
    return set(obs[slot, :, 1].tolist())


SMALL = """--goal-distance 0.3 --horizon 6 --total-timesteps 3000 --eval-frequency 1000 --eval-episodes 3
    --num-train-tasks 8 --num-test-tasks 10 --num-tasks-sample 4 --initial-episodes 2 --prior-episodes 4
    --posterior-episodes 16 --gradient-steps 8 --meta-batch-size 4 --batch-size 32 --context-size 16
    --buffer-size 360 --hidden-size 32 --relabel-prob 0.5 --no-cuda """


def run(module, arguments, run_dir, status=0):
    """Run a script in this process; returns the JSON of its last line (status 0 and 130) or what it says otherwise."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = [f"{module.__name__}.py", *arguments.split(), "--run-dir", str(run_dir)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            module.main()
    finally:
        sys.argv = argv
        torch.use_deterministic_algorithms(False)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert stopped.value.code == status, err.getvalue()
    if status in (0, 130):
        return json.loads(out.getvalue().splitlines()[-1])
    said = err.getvalue()
    assert said.startswith("failed: " if status == 1 else "error: ") and said.count("\n") == 1 and not out.getvalue()
    return said


def state(result):
    """A run's checkpoint without arguments and clocks."""
    content = torch.load(f"{result['run']}/checkpoint.pt", weights_only=True)
    counters = {key: value for key, value in content["counters"].items() if key not in ("started", "sps", "metrics")}
    counters = {key: value for key, value in counters.items() if not key.endswith("_s")}
    return {key: content[key] for key in content if key != "args"} | {"counters": counters}
