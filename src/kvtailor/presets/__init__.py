"""Plans with a name, one TOML file each: what `Plan.to_toml` writes, and a table `about` (paper, note, budget).

A preset brings methods and settings but no budget, so that every plan has its own; `about.budget` is one to begin with.
A preset may share its name with a method only if it holds that method.
"""

FULL = "full"
"""The canonical line of the null plan, which keeps everything as it is, and the name of its preset."""
