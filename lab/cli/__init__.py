"""The commands, one function each; imports of what a command runs stand inside it."""
