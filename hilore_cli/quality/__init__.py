"""`hilore bench --quality`: does training under a plan learn as it does under checkpointing?

    report = run_quality(setting_of("chain-sum"), pairs=8, folder=Path("quality/chain-sum"), device=device, ...)

Real GRPO runs through the attached runtime: sampling, rewards, several clipped updates of each batch. The runs of a pair share starting weights,
prompts and random numbers; how activations are kept is all that differs. In reading order: settings (data), problems and chars or text (what is
learnt), training (one run), arms (ways to run it), planning (the plans), statistics, archive (what is finished), experiment (all together).

What it does NOT do: emulate a plan by hooks (only the int2 control is), or measure speed (bench.py and suite.py do).
"""
