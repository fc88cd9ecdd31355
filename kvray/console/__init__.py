"""Shared by all commands: options, exit statuses, Ctrl-C, progress lines and pictures."""
