"""What serves a model: requests come in at any time, and each step of the model works on parts of many of them.

    step            the contract between the engine and what computes a step: arrays in, sampled tokens out
    package_stepper what computes the steps of a package
    ranks           where several processes share one        local_ranks     what starts them on a machine
    choices         which entry samples, and what it is handed
    dispatch, step_graphs   which CUDA graph a step takes, or why none; the graphs

    parameters      what a request asks for, checked
    blocks          the pages of the cache: who holds which, and which hold the beginning of a text that may come again
    request         one sequence from its arrival to its end
    scheduler       which tokens of which requests a step computes
    constraints     what a request forbids or favours among the next tokens
    batch           a plan of the scheduler as the arrays of a step
    text            tokens to text as they come, and strings that end it
    continuation    what a sequence has said, and whether a token ended it
    engine          the loop: plan, run, take the results in

    opening         from a package, weights and settings to an engine
    beside          what lies beside weights: tokenizer, chat template, ends of texts
    prompts         texts, token ids and conversations as tokens, for llm and server
    driver          the thread that makes an engine's steps
    llm             the engine for a program: `LLM(...).generate`, `stream`, `chat`
    background      the engine for programs with an event loop
    protocol        bodies of HTTP requests, checked        answers, exchange, streaming     those of responses
    workload        what steps there were, for the plan of graphs
    gate, metrics   what every HTTP request passes; numbers for Prometheus
    server, program the application, and the process that runs it until a signal

All of the bookkeeping is plain Python and numpy, on rank 0 alone, and tests run it without a model. Only
what comes after `background` needs the libraries of the extra `serve`.
"""
