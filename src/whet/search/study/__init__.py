"""The Optuna study: samplers, trials, scouting."""
