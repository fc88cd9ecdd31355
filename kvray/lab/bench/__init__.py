"""The benches of `kvray bench`: a module for each subcommand, over one runner and one report."""
