/* The lanes of an update of SAC: the passes of the networks, and the sampling of actions. */
#include <math.h>

#include "kernels.h"

VECTORISED static void limit_log_std(const sac_lane *lane, const float *raw, size count)
{
    for (size i = 0; i < count; i++)
        lane->log_std[i] = least(greatest(raw[i], lane->lowest), lane->highest);
}

/* Write the actions before tanh to `lane_actions`, and minus twice their sizes to `slope`. */
VECTORISED static void add_noise(const sac_lane *lane, const float *means, size count)
{
    for (size i = 0; i < count; i++) {
        lane->scaled_noise[i] = lane->scaled_noise[i] * lane->noise[i];
        lane->lane_actions[i] = means[i] + lane->scaled_noise[i];
        lane->slope[i] = fabsf(lane->lane_actions[i]) * -2.0f;
    }
}

/* Replace log1p(e^-2|x|) by the log-density, with the logarithm of the slope of tanh at x. */
VECTORISED static void compute_densities(const sac_lane *lane, size count)
{
    const float log_two = (float)0.69314718055994530942;
    for (size i = 0; i < count; i++) {
        const float tail = lane->slope[i] + fabsf(lane->lane_actions[i]);
        const float density = lane->noise[i] * lane->noise[i] * -0.5f - lane->log_std[i];
        lane->slope[i] = density - (log_two - tail) * 2.0f;
    }
}

/* Sample actions as in `SquashedGaussianHead`. */
static void sample_actions(const functions *f, const sac_lane *lane, const float *out, size rows)
{
    const size actions = lane->actor->sizes[lane->actor->layers] / 2, count = actions * rows;
    limit_log_std(lane, out + count, count);
    apply_unary(&f->exp, lane->log_std, lane->scaled_noise, count);
    add_noise(lane, out, count);
    apply_unary(&f->exp, lane->slope, lane->slope, count);
    apply_unary(&f->log1p, lane->slope, lane->slope, count);
    compute_densities(lane, count);
    add_rows(lane->slope, lane->log_probs, actions, rows);
    for (size row = 0; row < rows; row++)
        lane->log_probs[row] = lane->log_probs[row] - lane->log_volume;
    apply_unary(&f->tanh, lane->lane_actions, lane->lane_actions, count);
}

/* Compute the outputs of a lane's actor, and sample actions from them. */
void rlflame_sac_act(const functions *f, const sac_lane *lane)
{
    rlflame_forward(f, lane->actor, lane->actor_observations);
    if (lane->samples)
        sample_actions(f, lane, lane->actor->out, lane->actor->rows);
}

/* Copy a critic's observations to its inputs; return the inputs for actions. */
static float *write_observations(const sac_lane *lane, const network *net,
                                 const float *observations)
{
    const size units = lane->actor->sizes[0];
    transpose(observations, net->inputs[0], net->rows, units);
    return net->inputs[0] + units * net->rows;
}

static void evaluate(const functions *f, const sac_lane *lane, const network *net,
                     const float *observations, const float *policy_actions)
{
    const size count = (net->sizes[0] - lane->actor->sizes[0]) * net->rows;
    float *target = write_observations(lane, net, observations);
    memcpy(target, policy_actions, (size_t)count * sizeof(float));
    rlflame_forward(f, net, NULL);
}

/* Compute the values of a lane's critic, and the next values of its target. */
void rlflame_sac_evaluate_critic(const functions *f, const sac_lane *lane)
{
    const network *critic = lane->critic;
    evaluate(f, lane, lane->target, lane->next_observations, lane->next_policy_actions);
    transpose(lane->actions, write_observations(lane, critic, lane->observations), critic->rows,
              critic->sizes[0] - lane->actor->sizes[0]);
    rlflame_forward(f, critic, NULL);
}

/* Write the gradients of a lane's critic. */
void rlflame_sac_backward_critic(const functions *f, const sac_lane *lane)
{
    rlflame_backward(f, lane->critic, lane->upstream);
}

/* Compute the values of the sampled actions. */
void rlflame_sac_evaluate_actions(const functions *f, const sac_lane *lane)
{
    evaluate(f, lane, lane->critic, lane->observations, lane->policy_actions);
}

/* Write d(loss)/d(sampled actions), given d(loss)/d(their values). */
void rlflame_sac_compute_action_slopes(const functions *f, const sac_lane *lane)
{
    const network *critic = lane->critic;
    const size rows = critic->rows, units = critic->sizes[1];
    const size first = lane->actor->sizes[0], count = critic->sizes[0] - first;
    const float *upstream = lane->upstream, *weights = critic->weights[0] + first * units;
    for (size layer = critic->layers - 1; layer > 0; layer--) {
        rlflame_backward_layer(f, critic, layer, upstream);
        upstream = critic->deltas[layer - 1];
    }
    if (count == 1)
        f->multiply_vector(ROW_MAJOR, TRANSPOSED, units, rows, 1.0f, upstream, rows, weights, 1,
                           0.0f, lane->action_slopes, 1);
    else
        multiply(f, PLAIN, PLAIN, count, rows, units, weights, units, upstream, rows,
                 lane->action_slopes);
}
