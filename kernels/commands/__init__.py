"""The commands, one module for each group of them. A module adds its commands to `app.app`; `foretune.__main__` imports
them all. Commands may import every floor; nothing imports commands.
"""
