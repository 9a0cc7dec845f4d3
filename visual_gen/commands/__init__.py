"""The subcommands of `visual-gen`, one module each; the heavy imports of a command are made when it runs."""
