"""One file per command, or per few that belong together. torch, transformers, pandas and the solver are imported inside functions: `hilore --help` must answer at once."""

