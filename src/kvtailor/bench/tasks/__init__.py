"""The bench's tasks, one file each: what is asked of every plan, on the same tokens.

A task declares its settings, its metrics, its samples and how one is scored (`contract.py`, `settings.py`). The loop
over samples and plans, what is known from an earlier run, errors and progress are `bench.loop`'s. A file in this folder
that holds one public dataclass made from `PlanByPlan` or `AllAtOnce` is a task: no list names it.
"""
