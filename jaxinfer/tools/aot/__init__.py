"""Programs compiled by the real compilers for chips that are not attached.

    targets      which chips, and how their compilers are reached
    gpu_targets  GPUs by their published limits
    build        a model and options -> what an engine there would be (`resolve`)
    child        compiles them, in a process with an environment of its own; one JSON line per answer
    hlo          what stands in a compiled program's text: copies, collectives, cycles
    compiler     the parent's end of that process
    search       the largest setting that fits
    report       all of it for people
    run          one model for one target, from its options to the results

Nothing here is imported by the engine. Only `build` and `child` import jax.
"""
