"""The commands of the `foretune` script, one module for each group.

A module registers its commands with `app.command`; `foretune.__main__` imports all modules. Commands may import
every floor, and no other module imports commands.
"""
