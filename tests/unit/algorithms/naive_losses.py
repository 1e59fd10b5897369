"""The losses of tests/vectors once more, from their papers: plain floats, one token at a time.

Shares no code with `async_grpo.algorithms`. Gradients are central differences; `frozen` is the
policy that stop-gradients see, which stays put while `logp` moves.
"""

import math
import statistics


def tokens(inputs):
    """(sequence, token) of every trained token."""
    return [(i, t) for i, row in enumerate(inputs["mask"]) for t, kept in enumerate(row) if kept]


def row(inputs, i, values):
    return [values[i][t] for j, t in tokens(inputs) if j == i]


def log_w(inputs, i, t, frozen, config):
    proximal = inputs["prox"] if config["anchor"] == "prox" else frozen
    return proximal[i][t] - inputs["behav"][i][t]


def sequence_log_w(inputs, i, config, frozen):
    return [log_w(inputs, j, t, frozen, config) for j, t in tokens(inputs) if j == i]


def anchor_of(inputs, config, frozen):
    name = config.get("anchor", "prox")
    return frozen if name == "logp.detach()" else inputs[name]


def clip(value, low, high):
    return min(max(value, low), high)


def ppo(r, a, config):
    loss = max(-r * a, -clip(r, 1 - config["eps_low"], 1 + config["eps_high"]) * a)
    return min(loss, -config["c"] * a) if a < 0 and "c" in config else loss


def ratio(inputs, i, t, logp, config, frozen):
    return math.exp(logp[i][t] - anchor_of(inputs, config, frozen)[i][t])


def loss_ppo(inputs, config, i, t, logp, frozen):
    loss = ppo(ratio(inputs, i, t, logp, config, frozen), inputs["adv"][i][t], config)
    if config.get("beta"):
        d = inputs["ref"][i][t] - logp[i][t]
        loss += config["beta"] * (math.exp(d) - d - 1)
    return loss


def loss_gspo(inputs, config, i, t, logp, frozen):
    differences = [
        logp[j][u] - anchor_of(inputs, config, frozen)[j][u] for j, u in tokens(inputs) if j == i
    ]
    return ppo(math.exp(statistics.fmean(differences)), inputs["adv"][i][t], config)


def loss_gmpo(inputs, config, i, t, logp, frozen):
    a, c = inputs["adv"][i][t], config["log_clip"]
    clipped = []
    for j, u in tokens(inputs):
        if j == i:
            d = logp[j][u] - anchor_of(inputs, config, frozen)[j][u]
            clipped.append(min(d, c) if a > 0 else max(d, -c) if a < 0 else 0.0)
    return -a * math.exp(statistics.fmean(clipped))


def detached(cap_name):
    def loss(inputs, config, i, t, logp, frozen):
        r = ratio(inputs, i, t, frozen, config, frozen)
        return -min(r, config[cap_name]) * inputs["adv"][i][t] * logp[i][t]

    return loss


def loss_aipo_min(inputs, config, i, t, logp, frozen):
    r = ratio(inputs, i, t, logp, config, frozen)
    return -min(r, config["rho"]) * inputs["adv"][i][t]


def loss_sapo(inputs, config, i, t, logp, frozen):
    a, r = inputs["adv"][i][t], ratio(inputs, i, t, logp, config, frozen)
    tau = config["tau_pos"] if a > 0 else config["tau_neg"]
    return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))


def loss_reinforce(inputs, config, i, t, logp, frozen):
    return -inputs["adv"][i][t] * logp[i][t]


def weighted(weight):
    def loss(inputs, config, i, t, logp, frozen):
        return weight(inputs, config, i, t, frozen) * loss_ppo(inputs, config, i, t, logp, frozen)

    return loss


def capped(inputs, config, i, t, frozen):
    w = math.exp(log_w(inputs, i, t, frozen, config))
    if config.get("action") == "mask" and w > config["cap"]:
        return 0.0
    return min(w, config.get("cap", math.inf))


def window(value, config):
    return value if config["low"] <= value <= config["high"] else 0.0


def icepop(inputs, config, i, t, frozen):
    return window(math.exp(log_w(inputs, i, t, frozen, config)), config)


def sequence_capped(inputs, config, i, t, frozen):
    return min(math.exp(sum(sequence_log_w(inputs, i, config, frozen))), config["cap"])


def sequence_window(inputs, config, i, t, frozen):
    return window(math.exp(sum(sequence_log_w(inputs, i, config, frozen))), config)


def geometric_window(inputs, config, i, t, frozen):
    mean = statistics.fmean(sequence_log_w(inputs, i, config, frozen))
    return 1.0 if window(math.exp(mean), config) else 0.0


def loss_two_sided(inputs, config, i, t, logp, frozen):
    fixed = [ratio(inputs, j, u, frozen, config, frozen) for j, u in tokens(inputs) if j == i]
    own = ratio(inputs, i, t, frozen, config, frozen)
    kept = config["token_low"] <= own <= config["token_high"]
    kept = kept and min(fixed) >= config["sequence_mask_low"]
    return -ratio(inputs, i, t, logp, config, frozen) * inputs["adv"][i][t] if kept else 0.0


def loss_dppo(inputs, config, i, t, logp, frozen):
    a = inputs["adv"][i][t]
    delta = math.exp(frozen[i][t]) - math.exp(inputs["behav"][i][t])
    kept = delta <= config["tv_high"] if a > 0 else delta >= -config["tv_low"]
    r = ratio(inputs, i, t, frozen, config, frozen)
    return -min(r, config["tis_cap"]) * a * logp[i][t] if kept else 0.0


def loss_topr(inputs, config, i, t, logp, frozen):
    a = inputs["adv"][i][t]
    total = sum(frozen[j][u] - inputs["behav"][j][u] for j, u in tokens(inputs) if j == i)
    return -(1.0 if a >= 0 else clip(math.exp(total), *config["neg_clip"])) * a * logp[i][t]


def loss_aspo(inputs, config, i, t, logp, frozen):
    a, now = inputs["adv"][i][t], ratio(inputs, i, t, frozen, config, frozen)
    w = 1 / now if a > 0 else now
    return -a * w * math.exp(logp[i][t] - frozen[i][t])


def loss_m2po(inputs, config, i, t, logp, frozen):
    def log_r(j, u):
        return frozen[j][u] - inputs["behav"][j][u]

    pool = [(j, u) for j, u in tokens(inputs) if log_r(j, u) * inputs["adv"][j][u] > 0]
    pool.sort(key=lambda place: log_r(*place) ** 2)
    dropped = []
    while pool and statistics.fmean(log_r(*p) ** 2 for p in pool) > config["m2_threshold"]:
        dropped.append(pool.pop())
    if (i, t) in dropped:
        return 0.0
    return -ratio(inputs, i, t, logp, config, frozen) * inputs["adv"][i][t]


NAIVE = {
    "loss_grpo_clip02_behav_anchor": loss_ppo,
    "loss_grpo_clip02_k3_beta004": loss_ppo,
    "loss_dapo_token_mean_cliphigher": loss_ppo,
    "loss_dr_grpo_const_len": loss_ppo,
    "loss_dual_clip_c3": loss_ppo,
    "loss_gspo": loss_gspo,
    "loss_gspo_wide_clip": loss_gspo,
    "loss_gmpo": loss_gmpo,
    "loss_cispo_verl_1plus_eps5": detached("ratio_cap"),
    "loss_cispo_trl_max5": detached("ratio_cap"),
    "loss_cispo_tight_1p28": detached("ratio_cap"),
    "loss_aipo_stopgrad": detached("rho"),
    "loss_aipo_differentiable_min": loss_aipo_min,
    "loss_sapo": loss_sapo,
    "loss_gpg_reinforce": loss_reinforce,
    "loss_decoupled_ppo_raw": weighted(capped),
    "loss_decoupled_ppo_cap_mask": weighted(capped),
    "loss_decoupled_ppo_tis_token": weighted(capped),
    "loss_decoupled_single_step_prox_is_theta": weighted(capped),
    "loss_icepop_token": weighted(icepop),
    "loss_seq_tis": weighted(sequence_capped),
    "loss_seq_mis": weighted(sequence_window),
    "loss_geo_rs": weighted(geometric_window),
    "loss_prime_rl_two_sided_mask": loss_two_sided,
    "loss_dppo_binary_tv": loss_dppo,
    "loss_topr": loss_topr,
    "loss_aspo_flip_no_dualclip": loss_aspo,
    "loss_m2po": loss_m2po,
}


def aggregate(inputs, config, per_token):
    lengths = [sum(1 for kept in mask if kept) for mask in inputs["mask"]]
    sums = [sum(row(inputs, i, per_token)) for i in range(len(lengths))]
    match config["agg"]:
        case "token-mean":
            return sum(sums) / sum(lengths)
        case "seq-mean-token-mean" | "mean over sequences":
            return statistics.fmean(s / n for s, n in zip(sums, lengths, strict=True))
        case "seq-mean-token-sum":
            return statistics.fmean(sums)
        case "dr-grpo":
            return sum(sums) / (len(sums) * config["Lconst"])


def expected(name, inputs, config, step=1e-6):
    """Loss, per-token losses and gradient of one vector's inputs."""
    rule, logp = NAIVE[name], inputs["logp"]

    def per_token(values):
        found = [[0.0] * len(mask) for mask in inputs["mask"]]
        for i, t in tokens(inputs):
            found[i][t] = rule(inputs, config, i, t, values, logp)
        return found

    gradient = [[0.0] * len(mask) for mask in inputs["mask"]]
    for i, t in tokens(inputs):
        sides = []
        for sign in (1, -1):
            moved = [list(values) for values in logp]
            moved[i][t] += sign * step
            sides.append(aggregate(inputs, config, per_token(moved)))
        gradient[i][t] = (sides[0] - sides[1]) / (2 * step)
    values = per_token(logp)
    return {
        "loss": aggregate(inputs, config, values), "per_token": values, "grad_logp": gradient,
    }  # fmt: skip
