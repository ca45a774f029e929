"""Environments of the papers' experiments, registered with Gymnasium by `import envs` (or by an id with the module
in front: `gym.make("envs:FetchPushPaper-v0")`).

`BitFlip-v0`, the bit-flipping task of the HER paper, see envs/bit_flip.py.

`PointGoal-v0`, `WheeledGoal-v0` and `AntGoal-v0`, the sparse goal tasks of the HTR paper, see envs/goal_tasks.py.

The Fetch variants of the HER paper, see envs/fetch.py: `Fetch{TASK}FixedGoal-v0`, `Fetch{TASK}ShapedL{0,1}P{1,2}-v0`
and `Fetch{TASK}Paper-v0` for TASK in Reach, Push, Slide, PickAndPlace; `Fetch{TASK}Noisy-v0` for all but Reach.
"""

from gymnasium import register

register(
    id="BitFlip-v0",
    entry_point="envs.bit_flip:BitFlipEnv",
    vector_entry_point="envs.bit_flip:BitFlipVectorEnv",
)

for name in ("Point", "Wheeled", "Ant"):
    register(
        id=f"{name}Goal-v0",
        entry_point=f"envs.goal_tasks:{name}Env",
        vector_entry_point=f"envs.goal_tasks:{name}VectorEnv",
        disable_env_checker=True,
    )

for task in ("Reach", "Push", "Slide", "PickAndPlace"):
    for variant in ("FixedGoal", "ShapedL0P1", "ShapedL0P2", "ShapedL1P1", "ShapedL1P2", "Paper", "Noisy"):
        if (task, variant) != ("Reach", "Noisy"):  # the noise is on the object's position, and Reach has no object
            register(
                id=f"Fetch{task}{variant}-v0",
                entry_point=f"envs.fetch:Fetch{task}{variant}",
                max_episode_steps=50,
                disable_env_checker=True,
            )
