"""The experiments of the papers as data: what each runs, with which seeds, and the claim that it checks.

An experiment has variants, each a script and its arguments; `run.py` runs every variant with every seed.
"""

from dataclasses import dataclass, field


@dataclass
class Experiment:
    claim: str
    """what the paper says, and what the curves must show"""
    script: str
    """file of the repository's root"""
    variants: dict[str, str]
    """arguments of the script by the variant's name"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    cost: str = ""
    """what one run costs, as measured, and where"""
    arguments: str = ""
    """arguments of all variants"""
    seeds_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """seeds of the variants that have others than `seeds`"""

    def runs(self):
        """(variant, seed) pairs, seed by seed, so that an interrupted experiment has whole seeds."""
        every = {variant: self.seeds_of.get(variant, self.seeds) for variant in self.variants}
        pairs = [(variant, seed) for variant, seeds in every.items() for seed in seeds]
        return sorted(pairs, key=lambda pair: pair[1])

    def command(self, variant, seed):
        return [self.script, *self.arguments.split(), *self.variants[variant].split(), "--seed", str(seed)]


# Environment steps for n bits. The paper's budget is 160,000 episodes of n steps, 8 million steps for 50 bits. Plain
# DQN gets ten times as many where chance may still find goals, and fewer where it cannot.
BITFLIP_STEPS = {5: 10_000, 10: 20_000, 15: 40_000, 20: 60_000, 25: 100_000, 30: 160_000, 40: 400_000, 50: 1_200_000}
PLAIN_DQN_STEPS = BITFLIP_STEPS | {10: 200_000, 15: 400_000, 40: 160_000, 50: 160_000}

EXPERIMENTS = {
    "bitflip": Experiment(
        claim="HER Fig. 1: plain DQN fails from about 13 bits on, with HER 50 bits are solved",
        script="her_dqn_bitflip.py",
        variants={
            f"n{n}-{name}": f"--n-bits {n} --total-timesteps {steps} --eval-frequency {min(40_000, steps // 20)}{flags}"
            for name, flags, budget in (("her", "", BITFLIP_STEPS), ("dqn", " --strategy none", PLAIN_DQN_STEPS))
            for n, steps in budget.items()
        },
        seeds_of={f"n{n}-dqn": (1, 2) if n >= 25 else (1, 2, 3) for n in PLAIN_DQN_STEPS},
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
    ),
}
