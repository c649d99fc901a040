"""Ingot beside its peers on this machine's CPU: one command installs them, prepares one model for all, and measures.

    python -m tools.bench.peers smollm2|gemma3|llama-1b [--peers llama.cpp,openvino,...] [--rounds N] [--threads N]
                                [--json FILE [--resume]] [--markdown FILE] [--prepare]

Each peer lives in an environment of its own in the cache folder, with pinned versions; what it needs of the model is
converted once. `--prepare` does no more than that, so that it can be done hours before. Then the peers are measured in
turn, round by round (A B C A B C ...), each time in a new process, so that a busy moment of the machine falls on all of
them and a ratio is taken within a round. Who cannot be prepared or run is told with the reason, and left out. With
--json, each round is written as it ends; --resume goes on where such a file ends. A run measures

    generation   a prompt of 128 tokens, 128 more one by one: tokens a second after the first
    context      a prompt of 512 tokens: its tokens a second until the first token of the answer
    requests     16 prompts of 128 tokens at once, 128 tokens each: tokens of answers a second, prompts included
    load, memory seconds until the engine is ready, and the largest resident set of the process

Greedy, real text, lengths forced (EOS ignored). llama.cpp is measured by its own C++ tools, on random tokens and
without sampling, which flatters it. The ceilings of the machine are measured in the same run
(compiler/tune/machine.py).
"""
