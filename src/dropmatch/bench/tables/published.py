"""Numbers printed in the DropMatch paper (arXiv 2603.03333), by table, to stand beside our own.

Its setup: Llama-3.1-8B/70B-Instruct and Qwen3-4B/32B in vLLM on four A100, batch 1, K=5, p_drop=0.3. Accuracies in per
cent. docs/results.md says once what differs here."""

from __future__ import annotations

NUM_PATHS = 5  # its tables of single heads and votes mean little beside another K

# Table 1: HumanEval pass@1 of heads 1 to 5 by drop probability, Llama-3.1-70B; target without dropout, 8B draft model
HEAD_ACCURACY = {
    0.1: (81.1, 78.7, 81.1, 86.0, 77.4),
    0.2: (80.5, 81.1, 80.5, 81.1, 78.7),
    0.3: (78.7, 81.1, 75.6, 77.4, 79.9),
    0.4: (76.2, 79.3, 80.5, 73.2, 76.2),
    0.5: (78.7, 65.2, 73.8, 64.0, 70.1),
}
MODEL_ACCURACY = {"target": 81.7, "draft": 72.6}

# Table 2: by size of the majority, share of positions in per cent, and mean probability of the majority token
VOTES = {1: (0.00, 0.255), 2: (0.14, 0.325), 3: (0.82, 0.460), 4: (0.54, 0.517), 5: (98.40, 0.939)}

# Table 3: mean JS(centroid, draft) and JS(centroid, heads) of tokens kept by Eq. 6 and by Eq. 7, nats
DIVERGENCE = {"js": (0.0254, 0.0313), "majority": (0.0097, 0.0014)}

# Table 4: milliseconds and share of the forward in per cent, by our name of the part
OVERHEAD = {
    "forward": (107.0, 100.0),
    "plain head": (0.05, 0.05),
    "heads, naive (Eq. 4)": (0.17, 0.17),
    "heads with JS (Eq. 6, 7)": (1.74, 1.64),
}

# Table 5: throughput of DropMatch over lossless decoding by batch size, GSM8K, L=10
BATCH_SPEEDUP = {1: 1.19, 4: 1.18, 16: 1.12, 32: 1.10, 64: 1.15, 128: 1.10}

# Table 6: speed over lossless L=5, tau and accuracy by pair, (is DropMatch, L), and task
COMPARISON = {
    "Llama-3.1 8B/70B": {
        (False, 5): {
            "gsm8k": (1.00, 4.97, 94.69),
            "mmlu": (1.00, 4.02, 85.94),
            "ifeval": (1.00, 4.12, 85.60),
            "humaneval": (1.00, 5.40, 81.70),
        },
        (True, 5): {
            "gsm8k": (1.10, 5.50, 94.29),
            "mmlu": (1.09, 4.43, 85.50),
            "ifeval": (1.10, 4.48, 85.24),
            "humaneval": (1.00, 5.57, 79.89),
        },
        (False, 10): {
            "gsm8k": (1.02, 7.62, 95.40),
            "mmlu": (0.86, 5.25, 86.06),
            "ifeval": (0.87, 5.47, 86.86),
            "humaneval": (1.13, 8.87, 81.70),
        },
        (True, 10): {
            "gsm8k": (1.22, 9.20, 93.90),
            "mmlu": (1.02, 6.06, 85.34),
            "ifeval": (0.99, 6.34, 86.17),
            "humaneval": (1.12, 9.38, 78.70),
        },
    },
    "Qwen3 4B/32B": {
        (False, 5): {
            "gsm8k": (1.00, 5.06, 86.20),
            "mmlu": (1.00, 4.62, 83.21),
            "ifeval": (1.00, 3.40, 80.72),
            "humaneval": (1.00, 5.09, 90.4),
        },
        (True, 5): {
            "gsm8k": (1.07, 5.66, 87.49),
            "mmlu": (1.05, 5.15, 82.15),
            "ifeval": (1.19, 4.22, 78.24),
            "humaneval": (1.00, 5.27, 90.9),
        },
        (False, 10): {
            "gsm8k": (0.96, 7.87, 86.20),
            "mmlu": (1.12, 6.48, 83.26),
            "ifeval": (0.72, 4.04, 82.31),
            "humaneval": (1.31, 8.11, 92.1),
        },
        (True, 10): {
            "gsm8k": (1.13, 9.78, 86.58),
            "mmlu": (1.49, 8.60, 82.06),
            "ifeval": (0.98, 5.67, 81.60),
            "humaneval": (1.39, 8.72, 90.2),
        },
    },
}

# Table 7: speed over plain decoding, tau and quality (accuracy, MT-bench score, win rate) of EAGLE-3 on Llama-3.3-70B,
# 80 samples, by task, (is DropMatch, depth)
TREES = {
    "gsm8k": {
        (False, 5): (4.19, 5.82, 78.75),
        (False, 7): (4.65, 6.71, 78.75),
        (False, 9): (4.68, 6.71, 78.75),
        (True, 5): (4.32, 6.09, 78.75),
        (True, 7): (4.86, 7.07, 81.25),
        (True, 9): (5.03, 7.48, 80.00),
    },
    "mt_bench": {
        (False, 5): (3.90, 5.37, 8.47),
        (False, 7): (4.18, 5.81, 8.43),
        (False, 9): (4.24, 6.06, 8.48),
        (True, 5): (4.13, 5.86, 8.45),
        (True, 7): (4.52, 6.58, 8.46),
        (True, 9): (4.62, 6.89, 8.59),
    },
    "alpaca": {
        (False, 5): (4.31, 5.83, 50.0),
        (False, 7): (4.75, 6.59, 51.3),
        (False, 9): (4.92, 6.89, 50.6),
        (True, 5): (4.47, 6.30, 55.0),
        (True, 7): (5.02, 7.25, 56.0),
        (True, 9): (5.27, 7.74, 52.0),
    },
}

# Table 8: GSM8K 8-shot, Llama 8B/70B, window 32: accuracy and tokens/s of Auto-Judge, then with DropMatch, by threshold
JUDGE_GSM8K = {
    0.014: ((95.1, 57.4), (94.1, 73.9)),
    0.022: ((94.3, 62.2), (93.9, 77.6)),
    0.112: ((91.4, 84.8), (93.0, 90.4)),
    0.281: ((88.2, 90.1), (90.7, 95.9)),
}
JUDGE_BASE_SPEED = {8: 66.6, 32: 45.5}  # tokens/s of lossless decoding by draft length

# Table 9: LiveCodeBench: tau and pass@1 of Auto-Judge, then with DropMatch, by threshold
JUDGE_CODE = {
    0.0004: ((12.037, 31.14), (16.229, 29.32)),
    0.0123: ((14.141, 29.09), (18.587, 29.43)),
    0.0255: ((18.985, 27.95), (24.025, 29.09)),
    0.0508: ((27.549, 28.07), (32.674, 26.82)),
    0.1214: ((46.974, 23.98), (49.481, 22.39)),
}

# Table 10: KoMT-bench, L=7: score and tau by drafter and whether with DropMatch
FAR = {("draft-model", False): (8.08, 4.85), ("eagle3", False): (7.96, 1.46), ("draft-model", True): (8.12, 5.24)}
