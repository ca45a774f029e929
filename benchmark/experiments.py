"""The experiments of the papers as data: what each runs, with which seeds, at what cost, and the claim that it checks.

An experiment has variants, each a script and its arguments; `run.py` runs every variant with every seed. Rows H1 to H7
and the figures of the two papers, "Hindsight Experience Replay" (HER) and "Hindsight Task Relabelling" (HTR).
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Peer:
    """A number that others published, to stand beside ours."""

    name: str
    steps: int
    """environment steps, all workers counted"""
    value: float
    """success rate after these steps"""
    note: str = ""


@dataclass
class Experiment:
    claim: str
    """what the paper says, and what the curves must show"""
    script: str
    """file of the repository's root"""
    variants: dict[str, str]
    """arguments of the script by the variant's name"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    cost: str = "not measured"
    """what one run costs, as measured on a 2-core machine"""
    arguments: str = ""
    """arguments of all variants"""
    seeds_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """seeds of the variants that have others than `seeds`"""
    script_of: dict[str, str] = field(default_factory=dict)
    """script of the variants that have another than `script`"""
    processes_of: dict[str, int] = field(default_factory=dict)
    """processes of the variants that `torchrun` starts"""
    metric: str = "eval/success_rate"
    """what the gate, the table and the plot look at: from 0 up, higher is better"""
    threshold: float = 0.9
    """value of the metric from which a seed counts as having learned, for steps and minutes to it"""
    charts: tuple[str, ...] = ()
    """TensorBoard tags to keep beside the evaluations, in charts.csv"""
    paper: str = ""
    """what the paper's own figure or text gives in numbers"""
    peers: tuple[Peer, ...] = ()
    peers_note: str = ""
    """what makes the peers' numbers another thing than ours"""

    def runs(self):
        """(variant, seed) pairs, seed by seed, so that an interrupted experiment has whole seeds."""
        every = {variant: self.seeds_of.get(variant, self.seeds) for variant in self.variants}
        pairs = [(variant, seed) for variant, seeds in every.items() for seed in seeds]
        return sorted(pairs, key=lambda pair: pair[1])

    def script_name(self, variant):
        return self.script_of.get(variant, self.script)

    def flags(self, variant):
        """Arguments of the script, a list of strings."""
        return [*self.arguments.split(), *self.variants[variant].split()]

    def command(self, variant, seed):
        """What follows `python` on the command line, a list of strings."""
        launch = []
        if variant in self.processes_of:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            launch.append(str(self.processes_of[variant]))
        return [*launch, self.script_name(variant), *self.flags(variant), "--seed", str(seed)]


# ---------------------------------------------------------------------------------------------- HER, bit flipping: H1
# Environment steps for n bits. The paper's budget is 160,000 episodes of n steps, 8 million steps for 50 bits. Plain
# DQN gets ten times as many where chance may still find goals, and fewer where it cannot.
BITFLIP_STEPS = {5: 10_000, 10: 20_000, 15: 40_000, 20: 60_000, 25: 100_000, 30: 160_000, 40: 400_000, 50: 1_200_000}
PLAIN_DQN_STEPS = BITFLIP_STEPS | {10: 200_000, 15: 400_000, 40: 160_000, 50: 160_000}

BITFLIP = {
    "bitflip": Experiment(
        claim="HER Fig. 1: plain DQN fails from about 13 bits on, with HER 50 bits are solved",
        script="her_dqn_bitflip.py",
        variants={
            f"n{n}-{name}": f"--n-bits {n} --total-timesteps {steps} --eval-frequency {min(40_000, steps // 20)}{flags}"
            for name, flags, budget in (("her", "", BITFLIP_STEPS), ("dqn", " --strategy none", PLAIN_DQN_STEPS))
            for n, steps in budget.items()
        },
        seeds_of={f"n{n}-dqn": (1, 2) if n >= 25 else (1, 2, 3) for n in PLAIN_DQN_STEPS},
        cost="15 to 25 s up to 15 bits, 1 to 2 min at 25 to 40, 5 to 7 min at 50",
        threshold=0.99,
        paper="DQN solves up to about 13 bits, DQN + HER up to 50",
    ),
    "bitflip-settings": Experiment(
        claim="what lets DQN + HER solve many bits: each setting of App. A or of ours against the defaults, 30 bits",
        script="her_dqn_bitflip.py",
        arguments="--n-bits 30 --total-timesteps 160000 --eval-frequency 8000",
        variants={
            "default": "",
            "minibatch-128": "--batch-size 128 --gradient-steps 40",
            "slow-target": "--target-network-frequency 40",
            "no-terminate": "--no-terminate",
            "epsilon-0.5": "--epsilon 0.5",
            "epsilon-1": "--epsilon 1",
            "final": "--strategy final",
            "shaped-dqn": "--strategy none --reward shaped",
        },
        seeds=(1, 2, 3),
        cost="1 to 2 min",
        threshold=0.99,
    ),
    "bitflip-beyond": Experiment(
        claim="75 bits, beyond the paper's figure: what it takes is a step size that goes to 0",
        script="her_dqn_bitflip.py",
        arguments="--eval-frequency 250000 --epsilon 0.5",
        variants={
            "n75-anneal": "--n-bits 75 --hidden-size 768 --anneal-lr --total-timesteps 4000000",
            "n75-constant": "--n-bits 75 --hidden-size 768 --total-timesteps 8000000",
        },
        seeds=(1,),
        cost="50 to 70 min beside four other runs",
        threshold=0.99,
    ),
    "bitflip-smoke": Experiment(
        claim="8 bits in seconds, for the tests of the gate: learned with HER, not learned without",
        script="her_dqn_bitflip.py",
        arguments="--n-bits 8 --total-timesteps 2400 --eval-frequency 200 --eval-episodes 200",
        variants={"her": ""},
        seeds=tuple(range(1, 11)),
        cost="2 to 4 s and the start of Python",
    ),
}

# ---------------------------------------------------------------------------------------------- HER, Fetch: H2 to H7
METHODS = {
    "her-future": "",
    "her-final": "--strategy final",
    "ddpg": "--strategy none",
    "ddpg-count": "--strategy none --count-bonus 1",
}
STRATEGIES = ("future", "final", "episode", "random")
ONE_SEED = {variant: (1,) for variant in ("her-final", "ddpg", "ddpg-count")}
FETCH_COST = "100 to 215 environment steps/s: 1 to 2 h for 700,000 steps"
OLD_TASKS = "others ran the -v1 tasks of an older simulator; their steps count all workers"

FETCH_PEERS = {
    "push": (
        Peer("baselines DDPG + HER, 1 process", 1_140_000, 0.9, "5 seeds, 0.79 M to 1.31 M"),
        Peer("baselines, maintainer's log, 19 workers", 950_000, 0.9, "about; 1.0 at 1.9 M"),
        Peer("TianhongDai, 8 workers", 640_000, 0.9, "about, median of 5"),
        Peer("Intel coach, 8 workers", 350_000, 0.9, "about"),
        Peer("mrl DDPG + HER", 380_000, 0.9, "about"),
        Peer("mrl, with past goals", 260_000, 0.9, "about; 1.0 at 0.5 M"),
        Peer("Stable-Baselines3 TQC + HER", 300_000, 0.9, "1 seed"),
        Peer("RHER", 47_500, 0.9, "uses a reaching sub-task"),
    ),
    "pickandplace": (
        Peer("baselines DDPG + HER, 1 process", 1_470_000, 0.9),
        Peer("baselines, maintainer's log, 19 workers", 4_750_000, 0.9, "about, at the end"),
        Peer("TianhongDai, 16 workers", 2_600_000, 0.9, "about, median of 5"),
        Peer("Intel coach, 8 workers", 1_180_000, 0.9, "about"),
        Peer("mrl DDPG + HER", 550_000, 0.9, "about"),
        Peer("mrl, with past goals", 580_000, 0.9, "about"),
        Peer("Stable-Baselines3 TQC + HER", 400_000, 0.9, "1 seed"),
        Peer("RHER", 175_000, 0.9, "uses a reaching sub-task"),
    ),
    "slide": (
        Peer("TianhongDai, 8 workers", 4_500_000, 0.7, "median of 5"),
        Peer("Intel coach, 8 workers", 1_000_000, 0.7),
        Peer("mrl DDPG + HER", 2_200_000, 0.8),
        Peer("mrl, with past goals", 750_000, 0.8, "0.88 at 2.5 M"),
        Peer("Stable-Baselines3 TQC + HER", 3_000_000, 0.68, "about, 1 seed"),
    ),
}
FETCH_STEPS = {"push": "700000", "slide": "1000000", "pickandplace": "1000000"}

FETCH = {
    "fetchreach": Experiment(
        claim="the simplest Fetch task is learned within 10,000 steps (no figure of the paper)",
        script="her_ddpg_fetch.py",
        arguments="--env-id FetchReach-v4 --total-timesteps 10000 --eval-frequency 5000",
        variants={"her-future": ""},
        cost="75 s",
        peers=(
            Peer("others, to 0.9", 3_000, 0.9, "about"),
            Peer("others, to 1.0", 10_000, 1.0, "5,000 to 10,000"),
        ),
        peers_note=OLD_TASKS,
    ),
    "fetch-strategies": Experiment(
        claim="HER Fig. 6 on FetchReach, where it costs minutes: `future` best; Fig. 3: plain DDPG far behind",
        script="her_ddpg_fetch.py",
        arguments="--env-id FetchReach-v4 --total-timesteps 10000 --eval-frequency 1000 --eval-episodes 50 "
        "--past-goals 0",
        variants={name: f"--strategy {name}" for name in (*STRATEGIES, "none")},
        cost="3 to 5 min beside other runs",
    ),
}
for name, task in (("push", "Push"), ("slide", "Slide"), ("pickandplace", "PickAndPlace")):
    budget = f"--total-timesteps {FETCH_STEPS[name]}"
    registered = f"--env-id Fetch{task}-v4 {budget}"
    common = {"script": "her_ddpg_fetch.py", "seeds": (1, 2, 3), "cost": FETCH_COST}
    FETCH |= {
        f"fetch{name}": Experiment(
            claim=f"HER Fig. 3, {task}: solved with HER alone, neither by DDPG nor by DDPG with a count-based bonus",
            arguments=registered,
            variants=METHODS,
            seeds_of=ONE_SEED,
            paper="success within 7 cm (Slide: 20 cm), ours within 5 cm; 8 M steps in 2.5 h (Slide: 6 h) on 8 cores",
            peers=FETCH_PEERS[name],
            peers_note=OLD_TASKS,
            **common,
        ),
        f"fetch{name}-fixedgoal": Experiment(
            claim=f"HER Fig. 4, {task} with one fixed goal: HER far ahead of DDPG, slower than with many goals",
            arguments=f"--env-module envs --env-id Fetch{task}FixedGoal-v0 {budget}",
            variants=METHODS,
            seeds_of=ONE_SEED,
            **common,
        ),
        f"fetch{name}-shaped": Experiment(
            claim=f"HER Fig. 5, {task} reward lambda |g - s|^p - |g - s'|^p: solved neither with HER nor without",
            arguments=f"--env-module envs {budget}",
            variants={
                f"l{lam}p{power}-{method}": f"--env-id Fetch{task}ShapedL{lam}P{power}-v0{flag}"
                for lam in (0, 1)
                for power in (1, 2)
                for method, flag in (("her", ""), ("ddpg", " --strategy none"))
            },
            **common,
        ),
        f"fetch{name}-strategies": Experiment(
            claim=f"HER Fig. 6, {task}: `future` with k = 4 or 8 best, falling off above 8",
            arguments=f"{registered} --past-goals 0",
            variants={f"{s}-k{k}": f"--strategy {s} --k {k}" for s in STRATEGIES for k in (1, 2, 4, 8, 16)},
            **common,
        ),
    }
FETCH |= {
    "fetchpickandplace-noisy": Experiment(
        claim="HER Sec. 4.6: a policy trained with 1 cm of noise on the object keeps its success; for the one trained "
        "without, test it under noise too: `her_ddpg_fetch.py --evaluate .../model.pt --env-module envs --env-id "
        "FetchPickAndPlaceNoisy-v0`",
        arguments=f"--env-module envs --total-timesteps {FETCH_STEPS['pickandplace']} --save-model",
        variants={"exact": "--env-id FetchPickAndPlace-v4", "noisy": "--env-id FetchPickAndPlaceNoisy-v0"},
        script="her_ddpg_fetch.py",
        seeds=(1, 2, 3),
        cost=FETCH_COST,
        paper="on the robot: 2 of 5 trials, and 5 of 5 when trained with noise",
    ),
    "fetchpush-workers": Experiment(
        claim="HER Sec. 4.1: data-parallel workers, the same curve for each environment step in less wall time",
        arguments="--env-id FetchPush-v4 --num-workers 1",
        variants={"workers-1": "", "workers-2": "", "workers-8": ""},
        processes_of={"workers-2": 2, "workers-8": 8},
        script="her_ddpg_fetch.py",
        seeds=(1,),
        cost="not measured; 8 workers need 8 cores",
    ),
}

# -------------------------------------------------------------------------------------------------------- HTR, PEARL
SER, EC = "pearl_htr_ser.py", "pearl_htr_ec.py"
HTR_CHARTS = tuple(f"charts/{name}" for name in ("hindsight_task_distance", "real_reward", "hindsight_reward"))
PEARL_ITSELF = "--context all --prior normal"  # without what these scripts add to PEARL
COMPARED = {
    "pearl": f"--relabel-prob 0 --kl-warmup 1000000 --total-timesteps 4800000 {PEARL_ITSELF}",
    "oracle": "--relabel-prob 0 --reward dense --kl-warmup 1000000",
    "ser": "",
    "ser-k0.5": "--relabel-prob 0.5 --kl-warmup 1000000",
    "ec": "",
}
WITHOUT = {"oracle": COMPARED["oracle"], "ser": COMPARED["ser-k0.5"], "ec": ""}

HTR = {
    name: Experiment(
        claim=f"HTR Figs. 4 to 6, {name}: from sparse reward alone, HTR learns about as well as the oracle with dense "
        "reward, in meta-training and by adaptation episode, where PEARL stays near zero; SER about equals EC",
        script=SER,
        arguments=task,
        variants=COMPARED,
        script_of={"ec": EC},
        cost=cost,
        charts=HTR_CHARTS,
        threshold=0.5,
        paper="its text gives no returns",
    )
    for name, task, cost in (
        ("point", "--env-id PointGoal-v0 --goal-distance 2 --horizon 60", "35 min a million steps, beside others"),
        ("wheeled", "--env-id WheeledGoal-v0", "not measured"),
    )
}
HTR["point-normal"] = Experiment(
    claim="the experiment `point` with PEARL's contexts, of all episodes, and its prior, N(0, I): what it takes from "
    "each to do without the two things that these scripts add",
    script=SER,
    arguments=f"{HTR['point'].arguments} --total-timesteps 4800000 {PEARL_ITSELF}",
    variants=WITHOUT,
    script_of={"ec": EC},
    cost=HTR["point"].cost,
    charts=HTR_CHARTS,
    threshold=0.5,
)
HTR |= {
    f"{name}-k": Experiment(
        claim=f"HTR Figs. 9 and 10, {name}: K = 0.1 and 0.3 beat 0.5 and 0.8, hindsight tasks settle nearer the goals' "
        "distance; real reward is zero at first and appears later; EC about equals SER",
        script=SER,
        arguments=f"--env-id {env_id}",
        variants={
            f"{kind}-{k}": f"--relabel-prob {k} --total-timesteps {steps[kind]}"
            for kind in ("ser", "ec")
            for k in (0.1, 0.3, 0.5, 0.8)
        },
        script_of={f"ec-{k}": EC for k in (0.1, 0.3, 0.5, 0.8)},
        seeds=(1, 2),
        charts=HTR_CHARTS,
        threshold=0.5,
        cost=cost,
        paper="mean distance of hindsight tasks near 0.5 for K = 0.5 and 0.8, nearer 2.0 for 0.1 and 0.3",
    )
    for name, env_id, steps, cost in (
        ("point", "PointGoal-v0", {"ser": 840_000, "ec": 480_000}, "25 (EC) and 45 min (SER) beside three other runs"),
        ("wheeled", "WheeledGoal-v0", {"ser": 2_400_000, "ec": 2_400_000}, "not measured"),
    )
}
NEAR = "--env-id PointGoal-v0 --horizon 20 --gradient-steps 70 --kl-warmup 100000 --eval-frequency 24000"
for name, distance, steps, cost in (
    ("point-easy", 0.5, 240_000, "10 to 14 min beside other runs"),
    ("point-near", 1, 600_000, "not measured"),
):
    HTR[name] = Experiment(
        claim=f"HTR Fig. 11, goals {distance} m away: chance finds reward, and PEARL learns from it without HTR",
        script=SER,
        arguments=f"{NEAR} --goal-distance {distance} --total-timesteps {steps} {PEARL_ITSELF}",
        variants={"pearl": "--relabel-prob 0", "ser": "--relabel-prob 0.5", "ec": "--relabel-prob 0.5"},
        script_of={"ec": EC},
        charts=HTR_CHARTS,
        cost=cost,
    )

EXPERIMENTS = BITFLIP | FETCH | HTR


class Refused(Exception):
    """What was asked for cannot be done, said in one line; exit status 2."""


def select(experiment, only=""):
    """The experiment of that name, and the names of its variants that the regular expression `only` matches wholly."""
    if experiment not in EXPERIMENTS:
        raise Refused(f"no experiment {experiment}; there are: {', '.join(EXPERIMENTS)}")
    variants = EXPERIMENTS[experiment].variants
    try:
        chosen = [variant for variant in variants if re.fullmatch(only or ".*", variant)]
    except re.error as e:
        raise Refused(f"--only {only} is not a regular expression: {e}") from e
    if not chosen:
        raise Refused(f"--only {only} matches no variant of {experiment}; there are: {', '.join(variants)}")
    return EXPERIMENTS[experiment], chosen


def command_line(main, description):
    """Run `main(args: Args)` of a command; what it refuses is one line on standard error and exit status 2."""
    try:
        sys.exit(main(tyro.cli(main.__annotations__["args"], description=description)))
    except Refused as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
