/* Types and small functions of the compiled kernels.
 *
 * numpy computes the same results in several dozen calls. For small minibatches, most of the time
 * of these calls is overhead. The kernels call numpy's own BLAS for matrix products and numpy's own
 * loops for tanh, exp, log, maximum and sums. All other operations are single additions,
 * multiplications, divisions and square roots, in numpy's order. The results are therefore
 * bit-identical, provided that the compiler does not contract them into fused operations
 * (-ffp-contract=off).
 *
 * Arrays have the layout [units, rows], as in networks/mlp.py. The structures are mirrored in
 * library.py.
 */
#ifndef RLFLAME_KERNELS_H
#define RLFLAME_KERNELS_H

#include <stdint.h>
#include <string.h>

#define MAX_LAYERS 16
/* Constants of CBLAS. */
#define ROW_MAJOR 101
#define PLAIN 111
#define TRANSPOSED 112

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

/* Functions that only the kernels call. No other library can replace them. */
#if defined(__GNUC__)
#define INTERNAL __attribute__((visibility("hidden")))
#else
#define INTERNAL
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE()
#endif

typedef int64_t size;
typedef void (*matrix_product)(int, int, int, size, size, size, float, const float *, size,
                               const float *, size, float, float *, size);
typedef void (*matrix_vector_product)(int, int, size, size, float, const float *, size,
                                      const float *, size, float, float *, size);
typedef float (*dot_product)(size, const float *, size, const float *, size);
typedef void (*numpy_loop)(char **, const size *, const size *, void *);

typedef struct {
    numpy_loop loop;
    void *data;
} ufunc;

typedef struct {
    matrix_product multiply;
    matrix_vector_product multiply_vector;
    dot_product dot;
    ufunc tanh, exp, log, log1p, add, maximum;
} functions;

typedef struct {
    size layers, rows, tanh;
    size sizes[MAX_LAYERS + 1];
    const float *weights[MAX_LAYERS];
    float *gradients[MAX_LAYERS];
    /* The inputs of each layer, the last row of which contains ones. */
    float *inputs[MAX_LAYERS];
    /* d(loss)/d(units) of each hidden layer. */
    float *deltas[MAX_LAYERS];
    float *out;
    /* As many zeros as the largest hidden layer has outputs for all rows. */
    const float *zeros;
} network;

/* The distribution of actions: independent Gaussians, or a choice among several values. */
typedef struct {
    size is_choice;
    /* The number of Gaussians, or the number of values. */
    size actions;
    const float *log_std;
    float *log_std_gradient;
    /* [actions, rows], for Gaussians */
    float *z, *squares;
    /* [actions], for Gaussians */
    float *inverse;
    /* [actions, rows], for a choice */
    float *softmax, *log_softmax, *upstream, *terms;
    /* [rows] */
    float *log_probs, *log_ratio, *ratio, *slope, *objective;
} distribution;

/* The samples of a minibatch, and the coefficients of PPO's loss. */
typedef struct {
    const float *observations;
    /* float32 [rows, actions] for Gaussians, and int64 [rows] for a choice. */
    const void *actions;
    const float *log_probs, *advantages, *returns, *old_values;
    float lowest_ratio, highest_ratio, policy_scale, entropy_slope;
    float value_scale, value_limit;
    size clips_values;
} minibatch;

/* The squared norm of a network's gradient, and the sums of its loss. */
#define NUMBERS 5
#define NETWORKS 2

/* The part of shared memory that one learner writes. Exchanges alternate between the two rows, so a
 * learner may write the next numbers before the other learner has read these. */
typedef struct {
    size exchange;
    char padding[56];
    double numbers[2][8];
} mailbox;

/* PPO's loop over the minibatches of an epoch. */
typedef struct {
    /* The samples of the whole epoch, in shuffled order. */
    minibatch samples;
    double log_volume_constant;
    /* The actor and the critic. */
    const network *networks[NETWORKS];
    const distribution *head;
    float *losses;
    /* The gradient of one shard, and the sum over all shards, which is the same array if there is
     * only one shard. The networks have as many rows as a shard. */
    float *parameters, *gradient, *total, *first, *second;
    size shards;
    size starts[NETWORKS], ends[NETWORKS];
    /* Whether this learner computes the network. */
    size owns[NETWORKS];
    /* The rate and epsilon of each step of Adam, and the number of earlier steps. */
    const float *rates, *epsilons;
    size steps;
    /* The next minibatch, and the number of minibatches. */
    size position, count;
    size has_max_norm, has_kl_limit;
    double max_norm, kl_limit;
    double numbers[NETWORKS][NUMBERS];
    double totals[NETWORKS][NUMBERS], norm;
    /* The memory of this learner and of the other one, or null if there is only one learner. */
    mailbox *outbox, *inbox;
    size exchange, waits;
} epoch;

/* A step of Adam for a part of the parameters; rate and epsilon include the corrections of the
 * moments. If there are targets, they move towards the parameters by `target_rate`. */
typedef struct {
    float *parameters;
    const float *gradient;
    float *first, *second, *targets;
    size count;
    /* Whether moments that are too small to change a weight are set to zero. */
    size drops_still;
    float to_first, to_second, rate, epsilon, target_rate;
} adam_step;

/* The networks of one lane of an update of SAC: a copy of the actor, a critic and its target. */
typedef struct {
    const network *actor, *critic, *target;
    /* The samples of the minibatch, [rows, size]. The actor of the first lane reads the current
     * observations, and the actor of the second lane the next ones. */
    const float *actor_observations, *observations, *actions, *next_observations;
    /* Sampled actions for the current and the next observations, [actions, rows]. */
    const float *policy_actions, *next_policy_actions;
    /* Whether the lane samples actions from the outputs of its actor. [actions, rows]: the noise, the
     * sampled actions and buffers; [rows]: the log-densities of the actions. */
    size samples;
    const float *noise;
    float *lane_actions, *scaled_noise, *log_std, *slope, *log_probs;
    /* d(loss)/d(critic's values), and d(loss)/d(sampled actions). */
    const float *upstream;
    float *action_slopes;
    /* The limits of log_std, and the negative log-density of a standard Gaussian at its mean. */
    float lowest, highest, log_volume;
} sac_lane;

static inline void apply_unary(const ufunc *function, const float *x, float *y, size count)
{
    char *arguments[2] = {(char *)x, (char *)y};
    const size strides[2] = {sizeof(float), sizeof(float)};
    function->loop(arguments, &count, strides, function->data);
}

static inline void apply_binary(const ufunc *function, const float *x, const float *y, float *out,
                                size count)
{
    char *arguments[3] = {(char *)x, (char *)y, (char *)out};
    const size strides[3] = {sizeof(float), sizeof(float), sizeof(float)};
    function->loop(arguments, &count, strides, function->data);
}

/* numpy's minimum and maximum return NaN if either value is NaN. */
static inline float least(float a, float b) { return a < b || a != a ? a : b; }
static inline float greatest(float a, float b) { return a > b || a != a ? a : b; }

static inline float add_up(const functions *f, const float *x, size count)
{
    float total = 0.0f;
    char *arguments[3] = {(char *)&total, (char *)x, (char *)&total};
    const size strides[3] = {0, sizeof(float), 0};
    f->add.loop(arguments, &count, strides, f->add.data);
    return total;
}

/* Multiply a matrix [m, k] by a matrix [k, n]. If an operand or the result is a vector, np.dot calls
 * other functions of BLAS, and so do the callers. */
static inline void multiply(const functions *f, int transpose_a, int transpose_b, size m, size n,
                            size k, const float *a, size a_step, const float *b, size b_step,
                            float *out)
{
    f->multiply(ROW_MAJOR, transpose_a, transpose_b, m, n, k, 1.0f, a, a_step, b, b_step, 0.0f,
                out, n);
}

void rlflame_forward(const functions *f, const network *net, const float *x);
void rlflame_backward(const functions *f, const network *net, const float *upstream);
void rlflame_backward_layer(const functions *f, const network *net, size layer,
                            const float *upstream);
void rlflame_step_adam(const functions *f, const adam_step *step);
INTERNAL void transpose(const float *x, float *out, size rows, size columns);
INTERNAL void add_rows(const float *x, float *total, size count, size rows);
INTERNAL void write_gradient(const functions *f, const network *net, size layer,
                             const float *upstream);

#endif
