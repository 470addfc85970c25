"""1 for a response with an even number of bytes: of two responses, half of the pairs have the same score."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str.encode()) % 2 == 0)
