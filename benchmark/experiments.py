"""The experiments of the papers as data: what each runs, with which seeds, and the claim that it checks.

An experiment has variants, each a script and its arguments; `run.py` runs every variant with every seed. The papers are
"Hindsight Experience Replay" (HER) and "Hindsight Task Relabelling" (HTR).
"""

import fnmatch
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CURVES = ROOT / "benchmark" / "curves"
sys.path.append(str(ROOT))  # the scripts are imported too


@dataclass
class Experiment:
    claim: str  # what the paper says, and what the curves must show
    variants: dict[str, str]  # by name: script, a file of the repository's root, and its arguments
    arguments: str = ""  # of all variants
    seeds: int = 2  # seeds 1 to this
    seeds_of: dict[str, int] = field(default_factory=dict)  # of the variants that have more or fewer

    def runs(self):
        """(variant, seed) pairs, seed by seed, so that an interrupted experiment has whole seeds."""
        last = {variant: self.seeds_of.get(variant, self.seeds) for variant in self.variants}
        seeds = range(1, 1 + max(last.values()))
        return [(variant, seed) for seed in seeds for variant in last if seed <= last[variant]]

    def command(self, variant):
        """Script and arguments of a variant, a list of strings."""
        script, *flags = self.variants[variant].split()
        return [script, *self.arguments.split(), *flags]


DQN, DDPG, SER, EC = "her_dqn_bitflip.py", "her_ddpg_fetch.py", "pearl_htr_ser.py", "pearl_htr_ec.py"

# Environment steps for n bits. The paper's budget is 160,000 episodes of n steps, 8 million steps for 50 bits. Plain
# DQN gets ten times as many where chance may still find goals, and fewer where it cannot.
HER_STEPS = {5: 10_000, 10: 20_000, 15: 40_000, 20: 60_000, 25: 100_000, 30: 160_000, 40: 400_000, 50: 1_200_000}
DQN_STEPS = HER_STEPS | {10: 200_000, 15: 400_000, 40: 160_000, 50: 160_000}

HER_OR_NOT = {"her-future": DDPG, "ddpg": f"{DDPG} --strategy none"}
REACH = "--env-id FetchReach-v4 --total-timesteps 10000"
PUSH_STEPS = "--total-timesteps 700000 --checkpoint-frequency 50000"  # a run that is killed repeats little
STEPS = "--total-timesteps 1000000 --checkpoint-frequency 50000"

POINT = "--env-id PointGoal-v0 --goal-distance 2 --horizon 60 --checkpoint-frequency 120000"
NEAR = "--env-id PointGoal-v0 --horizon 20 --gradient-steps 70 --kl-warmup 100000 --eval-frequency 24000"
HALF = "--relabel-prob 0.5"
NEAR_VARIANTS = {"pearl": f"{SER} --relabel-prob 0", "ser": f"{SER} {HALF}", "ec": f"{EC} {HALF}"}
PEARL_ITSELF = "--context all --prior normal"  # without what these scripts add to PEARL
ORACLE = f"{SER} --relabel-prob 0 --reward dense --kl-warmup 1000000"

EXPERIMENTS = {
    # HER, bit flipping
    "bitflip": Experiment(
        claim="HER Fig. 1: plain DQN fails from about 13 bits on, with HER 50 bits are solved",
        variants={
            f"n{n}-{name}": f"{DQN} --n-bits {n} --total-timesteps {steps} --eval-frequency {min(40_000, steps // 20)}"
            + flags
            for name, flags, budget in (("her", "", HER_STEPS), ("dqn", " --strategy none", DQN_STEPS))
            for n, steps in budget.items()
        },
        seeds=5,
        seeds_of={f"n{n}-dqn": 2 if n >= 25 else 3 for n in DQN_STEPS},
    ),
    "bitflip-settings": Experiment(
        claim="what lets DQN + HER solve many bits: each setting of App. A or of ours against the defaults, 30 bits",
        arguments="--n-bits 30 --total-timesteps 160000 --eval-frequency 8000",
        variants={
            "default": DQN,
            "minibatch-128": f"{DQN} --batch-size 128 --gradient-steps 40",
            "slow-target": f"{DQN} --target-network-frequency 40",
            "no-terminate": f"{DQN} --no-terminate",
            "epsilon-0.5": f"{DQN} --epsilon 0.5",
            "epsilon-1": f"{DQN} --epsilon 1",
            "final": f"{DQN} --strategy final",
            "shaped-dqn": f"{DQN} --strategy none --reward shaped",
        },
        seeds=3,
    ),
    "bitflip-beyond": Experiment(
        claim="75 bits, beyond the paper's figure: what it takes is a step size that goes to 0",
        arguments="--n-bits 75 --hidden-size 768 --epsilon 0.5 --eval-frequency 250000 --total-timesteps 8000000",
        variants={"n75-anneal": f"{DQN} --anneal-lr --total-timesteps 4000000", "n75-constant": DQN},
        seeds=1,
    ),
    "bitflip-smoke": Experiment(
        claim="8 bits in seconds, for the tests of the gate: learned with HER, not learned without",
        arguments="--n-bits 8 --total-timesteps 2400 --eval-frequency 200 --eval-episodes 200",
        variants={"her": DQN},
        seeds=10,
    ),
    # HER, Fetch
    "fetchreach": Experiment(
        claim="the simplest Fetch task is learned within 10,000 steps (no figure of the paper)",
        arguments=f"{REACH} --eval-frequency 5000",
        variants={"her-future": DDPG},
        seeds=3,
    ),
    "fetch-strategies": Experiment(
        claim="HER Fig. 6 on FetchReach, where it costs minutes: `future` best; Fig. 3: plain DDPG far behind",
        arguments=f"{REACH} --eval-frequency 1000 --eval-episodes 50 --past-goals 0",
        variants={name: f"{DDPG} --strategy {name}" for name in ("future", "final", "episode", "random", "none")},
        seeds=3,
    ),
    "fetchpush": Experiment(
        claim="HER Fig. 3, Push: solved with HER alone, neither by DDPG nor by DDPG with a count-based bonus",
        arguments=f"--env-id FetchPush-v4 {PUSH_STEPS}",
        variants=HER_OR_NOT
        | {"her-final": f"{DDPG} --strategy final", "ddpg-count": f"{DDPG} --strategy none --count-bonus 1"},
        seeds_of={"her-future": 3},
    ),
    "fetchpush-fixedgoal": Experiment(
        claim="HER Fig. 4, Push with one fixed goal: HER far ahead of DDPG, slower than with many goals",
        arguments=f"--env-module envs --env-id FetchPushFixedGoal-v0 {PUSH_STEPS}",
        variants=HER_OR_NOT,
    ),
    "fetchpush-shaped": Experiment(
        claim="HER Fig. 5, Push with the reward -|g - s'|^2: solved neither with HER nor without",
        arguments=f"--env-module envs --env-id FetchPushShapedL0P2-v0 {PUSH_STEPS}",
        variants=HER_OR_NOT,
        seeds=1,
    ),
    "fetchpush-strategies": Experiment(
        claim="HER Fig. 6, Push: `future` with k = 4 or 8 best, falling off above 8",
        arguments=f"--env-id FetchPush-v4 --past-goals 0 {PUSH_STEPS}",
        variants={
            f"{name}-k{k}": f"{DDPG} --strategy {name} --k {k}"
            for name, ks in (("future", (1, 2, 4, 8, 16)), ("episode", (4,)), ("random", (4,)), ("final", (1,)))
            for k in ks
        },
        seeds_of={f"future-k{k}": 1 for k in (1, 2, 8, 16)},
    ),
    "fetchslide": Experiment(
        claim="HER Fig. 3, Slide: solved with HER alone",
        arguments=f"--env-id FetchSlide-v4 {STEPS}",
        variants=HER_OR_NOT,
        seeds_of={"ddpg": 1},
    ),
    "fetchpickandplace": Experiment(
        claim="PickAndPlace as others have it, without the half of the episodes that in the paper start grasped",
        arguments=f"--env-id FetchPickAndPlace-v4 {STEPS}",
        variants={"her-future": DDPG},
        seeds=3,
    ),
    "fetchpickandplace-paper": Experiment(
        claim="HER Fig. 3, PickAndPlace as in the paper, half of the episodes start grasped: solved with HER alone",
        arguments=f"--env-module envs --env-id FetchPickAndPlacePaper-v0 {STEPS}",
        variants=HER_OR_NOT,
        seeds_of={"ddpg": 1},
    ),
    "fetchpickandplace-noisy": Experiment(
        claim="HER Sec. 4.6: a policy trained with 1 cm of noise on the object succeeds with noise and without",
        arguments=f"--env-module envs --env-id FetchPickAndPlaceNoisy-v0 --save-model {STEPS}",
        variants={"noisy": DDPG},
        seeds=1,
    ),
    # HTR, PEARL
    "point": Experiment(
        claim="HTR Figs. 4 to 6: where PEARL stays near zero, SER and EC about equal the oracle with dense reward",
        arguments=POINT,
        variants={
            "pearl": f"{SER} --relabel-prob 0 --kl-warmup 1000000 --total-timesteps 4800000 {PEARL_ITSELF}",
            "oracle": ORACLE,
            "ser": SER,
            "ser-k0.5": f"{SER} {HALF} --kl-warmup 1000000",
            "ec": EC,
        },
    ),
    "point-normal": Experiment(
        claim="`point` without what these scripts add to PEARL: contexts of one episode, a prior of tasks",
        arguments=f"{POINT} --total-timesteps 4800000 {PEARL_ITSELF}",
        variants={"oracle": ORACLE, "ser": f"{SER} {HALF} --kl-warmup 1000000", "ec": EC},
    ),
    "point-k": Experiment(
        claim="HTR Figs. 9, 10: K = 0.1 and 0.3 beat 0.5 and 0.8, hindsight tasks near 2 m, not 0.5; reward comes late",
        arguments="--env-id PointGoal-v0 --checkpoint-frequency 120000",
        variants={
            f"{name}-{k}": f"{script} --relabel-prob {k} --total-timesteps {steps}"
            for name, script, steps in (("ser", SER, 840_000), ("ec", EC, 480_000))
            for k in (0.1, 0.3, 0.5, 0.8, 1.0)
        },
    ),
    "point-easy": Experiment(
        claim="HTR Fig. 11, goals 0.5 m away: chance finds reward, and PEARL learns from it without HTR",
        arguments=f"{NEAR} --goal-distance 0.5 --total-timesteps 240000 {PEARL_ITSELF}",
        variants=NEAR_VARIANTS,
    ),
    "point-near": Experiment(
        claim="PEARL's own task, goals 1 m away: chance finds reward, and PEARL learns from it without HTR",
        arguments=f"{NEAR} --goal-distance 1 --total-timesteps 600000 {PEARL_ITSELF}",
        variants=NEAR_VARIANTS,
    ),
}

PEERS = """
| environment steps to a success of | 0.9 on Push | 0.9 on PickAndPlace | on Slide |
|---|---|---|---|
| baselines DDPG + HER, 1 process | 1.14 M (5 seeds, 0.79 M to 1.31 M) | 1.47 M | |
| baselines, maintainer's log, 19 workers | about 0.95 M, 1.0 at 1.9 M | about 4.75 M, at the end | |
| TianhongDai, 8 workers (PickAndPlace: 16), median of 5 | about 0.64 M | about 2.6 M | 0.7 at 4.5 M |
| Intel coach, 8 workers | about 0.35 M | about 1.18 M | 0.7 at 1.0 M |
| mrl DDPG + HER | about 0.38 M | about 0.55 M | 0.8 at 2.2 M |
| mrl, with past goals | about 0.26 M, 1.0 at 0.5 M | about 0.58 M | 0.8 at 0.75 M, 0.88 at 2.5 M |
| Stable-Baselines3 TQC + HER, 1 seed | 0.30 M | 0.40 M | about 0.68 at 3.0 M |
| RHER, which uses a reaching sub-task | 0.048 M | 0.175 M | |

They ran the -v1 tasks of an older simulator, and their steps count all workers. FetchReach takes others about 3,000
steps to 0.9 and 5,000 to 10,000 to 1.0. The HER paper took 8 M steps and 2.5 h (Slide: 6 h) on 8 cores, and counts
success within 7 cm (Slide: 20 cm) where Gymnasium-Robotics has 5 cm.
"""


def fail(message):
    """Leave with one line on standard error: what was asked for cannot be done."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def select(experiment, only="*"):
    """Names of the variants of an experiment that match the pattern `only`."""
    if experiment not in EXPERIMENTS:
        fail(f"no experiment {experiment}; there are: {', '.join(EXPERIMENTS)}")
    variants = EXPERIMENTS[experiment].variants
    if not (chosen := fnmatch.filter(variants, only)):
        fail(f"--only {only} matches no variant of {experiment}; there are: {', '.join(variants)}")
    return chosen
