"""The commands, one function each; `headmax_cli` finds them by name. Imports of what a command runs stand inside it."""
