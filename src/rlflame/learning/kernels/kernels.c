/* Passes of small multilayer perceptrons, the loss of PPO, Adam, and PPO's loop over minibatches.
 *
 * numpy computes the same results in several dozen calls. For small minibatches, most of the time
 * of these calls is overhead. The kernels call numpy's own BLAS for matrix products and numpy's own
 * loops for tanh, exp, maximum and sums. All other operations are single additions,
 * multiplications, divisions and square roots, in numpy's order. The results are therefore
 * bit-identical, provided that the compiler does not contract them into fused operations
 * (-ffp-contract=off).
 *
 * Arrays have the layout [units, rows], as in networks/mlp.py. The structures are mirrored in
 * library.py.
 */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#define MAX_LAYERS 16
#define BLOCK_ROWS 16
/* Constants of CBLAS. */
#define ROW_MAJOR 101
#define PLAIN 111
#define TRANSPOSED 112

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
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
    ufunc tanh, exp, add, maximum;
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
    const float *zeros;
} network;

typedef struct {
    size actions;
    const float *log_std;
    float *log_std_gradient;
    /* [actions, rows] */
    float *z, *squares;
    /* [actions] */
    float *inverse;
    /* [rows] */
    float *log_probs, *log_ratio, *ratio, *slope, *objective;
} gaussian;

/* The samples of a minibatch, and the coefficients of PPO's loss. */
typedef struct {
    const float *observations, *actions, *log_probs, *advantages, *returns, *old_values;
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
    const gaussian *head;
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

/* The version and the sizes of the structures, which library.py compares with its own. */
#define VERSION 4
const size rlflame_layout[] = {VERSION, sizeof(functions), sizeof(network), sizeof(gaussian),
                               sizeof(minibatch), sizeof(mailbox), sizeof(epoch)};

static void apply_unary(const ufunc *function, const float *x, float *y, size count)
{
    char *arguments[2] = {(char *)x, (char *)y};
    const size strides[2] = {sizeof(float), sizeof(float)};
    function->loop(arguments, &count, strides, function->data);
}

static void apply_binary(const ufunc *function, const float *x, const float *y, float *out,
                         size count)
{
    char *arguments[3] = {(char *)x, (char *)y, (char *)out};
    const size strides[3] = {sizeof(float), sizeof(float), sizeof(float)};
    function->loop(arguments, &count, strides, function->data);
}

static float add_up(const functions *f, const float *x, size count)
{
    float total = 0.0f;
    char *arguments[3] = {(char *)&total, (char *)x, (char *)&total};
    const size strides[3] = {0, sizeof(float), 0};
    f->add.loop(arguments, &count, strides, f->add.data);
    return total;
}

/* Multiply a matrix [m, k] by a matrix [k, n]. If an operand or the result is a vector, np.dot calls
 * other functions of BLAS, and so do the callers. */
static void multiply(const functions *f, int transpose_a, int transpose_b, size m, size n, size k,
                     const float *a, size a_step, const float *b, size b_step, float *out)
{
    f->multiply(ROW_MAJOR, transpose_a, transpose_b, m, n, k, 1.0f, a, a_step, b, b_step, 0.0f,
                out, n);
}

/* Transpose a matrix [rows, columns] in blocks of rows, which stay in the processor's cache. */
static void transpose(const float *x, float *out, size rows, size columns)
{
    for (size first = 0; first < rows; first += BLOCK_ROWS) {
        const size end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
        for (size column = 0; column < columns; column++)
            for (size row = first; row < end; row++)
                out[column * rows + row] = x[row * columns + column];
    }
}

/* Write the outputs for the rows of x, or for the inputs in the buffer if x is null. */
void rlflame_forward(const functions *f, const network *net, const float *x)
{
    const size rows = net->rows, inputs = net->sizes[0];
    if (x)
        transpose(x, net->inputs[0], rows, inputs);
    for (size layer = 0; layer < net->layers; layer++) {
        const int is_last = layer == net->layers - 1;
        const size units = net->sizes[layer + 1], fan_in = net->sizes[layer] + 1;
        float *out = is_last ? net->out : net->inputs[layer + 1];
        if (units == 1)
            f->multiply_vector(ROW_MAJOR, TRANSPOSED, fan_in, rows, 1.0f, net->inputs[layer], rows,
                               net->weights[layer], 1, 0.0f, out, 1);
        else
            multiply(f, TRANSPOSED, PLAIN, units, rows, fan_in, net->weights[layer], units,
                     net->inputs[layer], rows, out);
        if (is_last)
            break;
        if (net->tanh)
            apply_unary(&f->tanh, out, out, units * rows);
        else
            for (size unit = 0; unit < units; unit++)
                apply_binary(&f->maximum, out + unit * rows, net->zeros, out + unit * rows, rows);
    }
}

VECTORISED static void apply_tanh_slope(const float *units, float *delta, size count)
{
    for (size i = 0; i < count; i++)
        delta[i] = delta[i] * (1.0f - units[i] * units[i]);
}

VECTORISED static void apply_relu_slope(const float *units, float *delta, size count)
{
    for (size i = 0; i < count; i++)
        delta[i] = delta[i] * (units[i] > 0.0f ? 1.0f : 0.0f);
}

/* Write d(loss)/d(input of the activation below the layer), given d(loss)/d(its outputs). */
void rlflame_backward_layer(const functions *f, const network *net, size layer,
                            const float *upstream)
{
    const size rows = net->rows, fan_in = net->sizes[layer], units = net->sizes[layer + 1];
    float *delta = net->deltas[layer - 1];
    multiply(f, PLAIN, PLAIN, fan_in, rows, units, net->weights[layer], units, upstream, rows,
             delta);
    if (net->tanh)
        apply_tanh_slope(net->inputs[layer], delta, fan_in * rows);
    else
        apply_relu_slope(net->inputs[layer], delta, fan_in * rows);
}

/* Write the parameter gradients, given d(loss)/d(output). */
void rlflame_backward(const functions *f, const network *net, const float *upstream)
{
    const size rows = net->rows;
    for (size layer = net->layers - 1; layer >= 0; layer--) {
        const size fan_in = net->sizes[layer] + 1, units = net->sizes[layer + 1];
        if (units == 1)
            f->multiply_vector(ROW_MAJOR, PLAIN, fan_in, rows, 1.0f, net->inputs[layer], rows,
                               upstream, 1, 0.0f, net->gradients[layer], 1);
        else
            multiply(f, PLAIN, TRANSPOSED, fan_in, units, rows, net->inputs[layer], rows, upstream,
                     rows, net->gradients[layer]);
        if (layer == 0)
            break;
        rlflame_backward_layer(f, net, layer, upstream);
        upstream = net->deltas[layer - 1];
    }
}

/* numpy's minimum and maximum return NaN if either value is NaN. */
static inline float least(float a, float b) { return a < b || a != a ? a : b; }
static inline float greatest(float a, float b) { return a > b || a != a ? a : b; }

VECTORISED static void standardise_actions(const gaussian *head, const float *actions,
                                           const float *means, size rows)
{
    const size count = head->actions;
    for (size action = 0; action < count; action++) {
        const float inverse = head->inverse[action];
        float *z = head->z + action * rows, *squares = head->squares + action * rows;
        for (size row = 0; row < rows; row++) {
            z[row] = (actions[row * count + action] - means[action * rows + row]) * inverse;
            squares[row] = z[row] * z[row];
        }
    }
}

VECTORISED static void sum_log_probs(const gaussian *head, const float *old_log_probs,
                                     float log_volume, size rows)
{
    float *total = head->log_probs;
    memcpy(total, head->squares, (size_t)rows * sizeof(float));
    for (size action = 1; action < head->actions; action++)
        for (size row = 0; row < rows; row++)
            total[row] += head->squares[action * rows + row];
    for (size row = 0; row < rows; row++)
        head->log_ratio[row] = (total[row] * -0.5f - log_volume) - old_log_probs[row];
}

VECTORISED static size compute_objective(const gaussian *head, const minibatch *batch, size rows)
{
    size changes = 0;
    for (size row = 0; row < rows; row++) {
        const float ratio = head->ratio[row], advantage = batch->advantages[row];
        float clipped = least(greatest(ratio, batch->lowest_ratio), batch->highest_ratio);
        changes += clipped != ratio;
        const float surrogate = ratio * advantage;
        clipped *= advantage;
        head->slope[row] = (surrogate <= clipped ? surrogate : 0.0f) * batch->policy_scale;
        head->objective[row] = least(surrogate, clipped);
        head->ratio[row] = (ratio - 1.0f) - head->log_ratio[row];
    }
    return changes;
}

VECTORISED static void scale_z(const gaussian *head, size rows)
{
    for (size action = 0; action < head->actions; action++)
        for (size row = 0; row < rows; row++)
            head->z[action * rows + row] =
                head->z[action * rows + row] * head->slope[row] * head->inverse[action];
}

/* Write the actor's gradient. Sums: objective, log volume, KL estimate, clipped ratios. */
void rlflame_policy_gradient(const functions *f, const network *net, const gaussian *head,
                             const minibatch *batch, double log_volume_constant, double *sums)
{
    const size rows = net->rows, actions = head->actions;
    rlflame_forward(f, net, batch->observations);
    const double log_volume = (double)add_up(f, head->log_std, actions) + log_volume_constant;
    for (size action = 0; action < actions; action++)
        head->inverse[action] = -head->log_std[action];
    apply_unary(&f->exp, head->inverse, head->inverse, actions);
    standardise_actions(head, batch->actions, net->out, rows);
    sum_log_probs(head, batch->log_probs, (float)log_volume, rows);
    apply_unary(&f->exp, head->log_ratio, head->ratio, rows);
    const size changes = compute_objective(head, batch, rows);
    if (actions == 1)
        head->log_std_gradient[0] = f->dot(rows, head->squares, 1, head->slope, 1);
    else
        f->multiply_vector(ROW_MAJOR, PLAIN, actions, rows, 1.0f, head->squares, rows, head->slope,
                           1, 0.0f, head->log_std_gradient, 1);
    const float common = batch->entropy_slope - add_up(f, head->slope, rows);
    for (size action = 0; action < actions; action++)
        head->log_std_gradient[action] += common;
    scale_z(head, rows);
    rlflame_backward(f, net, head->z);
    sums[0] = add_up(f, head->objective, rows);
    sums[1] = log_volume;
    sums[2] = add_up(f, head->ratio, rows);
    sums[3] = (double)changes;
}

VECTORISED static void compute_value_slopes(const minibatch *batch, float *values, float *losses,
                                            size rows)
{
    const float limit = batch->value_limit;
    for (size row = 0; row < rows; row++) {
        const float error = values[row] - batch->returns[row];
        float slope = error, loss = error * error;
        if (batch->clips_values) {
            const float change = values[row] - batch->old_values[row];
            const float clipped = least(greatest(change, -limit), limit);
            const float clipped_error = batch->old_values[row] + clipped - batch->returns[row];
            const float clipped_loss = clipped_error * clipped_error;
            slope = clipped_loss > loss && clipped != change ? 0.0f : error;
            loss = greatest(loss, clipped_loss);
        }
        values[row] = slope * batch->value_scale;
        losses[row] = loss;
    }
}

/* Write the critic's gradient; return the sum of the losses. */
double rlflame_value_gradient(const functions *f, const network *net, const minibatch *batch,
                              float *losses)
{
    rlflame_forward(f, net, batch->observations);
    compute_value_slopes(batch, net->out, losses, net->rows);
    rlflame_backward(f, net, net->out);
    return add_up(f, losses, net->rows);
}

/* Take a step of Adam; rate and epsilon include the corrections of the moments. */
VECTORISED void rlflame_adam(float *parameters, const float *gradient, float *first, float *second,
                             size count, float to_first, float to_second, float rate,
                             float epsilon)
{
    for (size i = 0; i < count; i++) {
        first[i] = first[i] + (gradient[i] - first[i]) * to_first;
        second[i] = second[i] + (gradient[i] * gradient[i] - second[i]) * to_second;
        parameters[i] = parameters[i] - first[i] / (sqrtf(second[i]) + epsilon) * rate;
    }
}

VECTORISED static void scale(float *x, float factor, size count)
{
    for (size i = 0; i < count; i++)
        x[i] = x[i] * factor;
}

/* Set moments that are too small to change a weight to zero; optim.py explains why. */
VECTORISED static void drop_still_moments(float *first, float *second, size count)
{
    for (size i = 0; i < count; i++) {
        const int is_still = fabsf(first[i]) < 1e-28f;
        first[i] = is_still ? 0.0f : first[i];
        second[i] = is_still && second[i] < 1e-34f ? 0.0f : second[i];
    }
}

VECTORISED static void add_to(float *total, const float *x, size count)
{
    for (size i = 0; i < count; i++)
        total[i] = total[i] + x[i];
}

/* Compute the gradients and the sums of this learner's networks for one shard. */
static void compute_shard(const functions *f, epoch *e, size shard, double sums[][NUMBERS])
{
    const size rows = e->networks[0]->rows;
    const size first_row = (e->position * e->shards + shard) * rows;
    minibatch batch = e->samples;
    batch.observations += first_row * e->networks[0]->sizes[0];
    if (e->owns[0]) {
        double parts[4];
        batch.actions += first_row * e->head->actions;
        batch.log_probs += first_row;
        batch.advantages += first_row;
        rlflame_policy_gradient(f, e->networks[0], e->head, &batch, e->log_volume_constant, parts);
        sums[0][1] = -parts[0];
        sums[0][2] = -((double)rows * (parts[1] + 0.5 * (double)e->head->actions));
        sums[0][3] = parts[2];
        sums[0][4] = parts[3];
    }
    if (e->owns[1]) {
        batch.returns += first_row;
        batch.old_values += first_row;
        sums[1][1] = rlflame_value_gradient(f, e->networks[1], &batch, e->losses);
    }
}

/* Add the gradients and sums of this learner's networks over the shards of a minibatch, in order, and
 * compute the squared norms of the gradients. */
static void compute_gradients(const functions *f, epoch *e)
{
    double sums[NETWORKS][NUMBERS] = {{0.0}};
    for (size shard = 0; shard < e->shards; shard++) {
        compute_shard(f, e, shard, sums);
        for (size n = 0; n < NETWORKS; n++) {
            const size start = e->starts[n], count = e->ends[n] - start;
            if (!e->owns[n])
                continue;
            for (size i = 1; i < NUMBERS; i++)
                e->numbers[n][i] = shard ? e->numbers[n][i] + sums[n][i] : sums[n][i];
            if (shard)
                add_to(e->total + start, e->gradient + start, count);
            else if (e->shards > 1)
                memcpy(e->total + start, e->gradient + start, (size_t)count * sizeof(float));
        }
    }
    for (size n = 0; n < NETWORKS; n++)
        if (e->owns[n]) {
            const float *total = e->total + e->starts[n];
            e->numbers[n][0] = (double)f->dot(e->ends[n] - e->starts[n], total, 1, total, 1);
        }
}

static void send_numbers(epoch *e)
{
    double *row = e->outbox->numbers[++e->exchange & 1];
    memcpy(row, e->numbers[e->owns[0] ? 0 : 1], sizeof e->numbers[0]);
    __atomic_store_n(&e->outbox->exchange, e->exchange, __ATOMIC_RELEASE);
}

/* Wait about a millisecond for the numbers of the other learner; return 0 if they did not arrive. */
static int receive_numbers(epoch *e)
{
    for (int i = 0; i < 1000; i++) {
        for (int j = 0; j < 50; j++) {
            if (__atomic_load_n(&e->inbox->exchange, __ATOMIC_ACQUIRE) >= e->exchange) {
                const double *row = e->inbox->numbers[e->exchange & 1];
                memcpy(e->numbers[e->owns[0] ? 1 : 0], row, sizeof e->numbers[0]);
                return 1;
            }
            PAUSE();
        }
        sched_yield();
    }
    return 0;
}

/* Clip the gradient and take a step of Adam. */
static void take_step(epoch *e, double norm)
{
    for (size n = 0; n < NETWORKS; n++) {
        const size start = e->starts[n], count = e->ends[n] - start;
        if (!e->owns[n])
            continue;
        if (e->has_max_norm && norm > e->max_norm)
            scale(e->total + start, (float)(e->max_norm / (norm + 1e-6)), count);
        rlflame_adam(e->parameters + start, e->total + start, e->first + start,
                     e->second + start, count, (float)(1 - 0.9), (float)(1 - 0.999), *e->rates,
                     *e->epsilons);
        if ((e->steps + 1) % 64 == 0)
            drop_still_moments(e->first + start, e->second + start, count);
    }
    e->steps++;
    e->rates++;
    e->epsilons++;
}

/* Learn from the next minibatches. Return 0 at the end of the epoch, 1 if the other learner is late,
 * or 2 at a minibatch that ppo.py must handle: its numbers are not finite, or its KL estimate
 * exceeds the limit. */
size rlflame_run_epoch(const functions *f, epoch *e)
{
    const double rows = (double)(e->networks[0]->rows * e->shards);
    for (; e->position < e->count; e->position++) {
        if (!e->waits) {
            compute_gradients(f, e);
            if (e->inbox)
                send_numbers(e);
        }
        e->waits = e->inbox && !receive_numbers(e);
        if (e->waits)
            return 1;
        const double norm = sqrt(e->numbers[0][0] + e->numbers[1][0]);
        int is_finite = isfinite(norm);
        for (size i = 1; i < NUMBERS; i++)
            is_finite &= isfinite(e->numbers[0][i]) && isfinite(e->numbers[1][i]);
        if (!is_finite || (e->has_kl_limit && e->numbers[0][3] / rows > e->kl_limit))
            return 2;
        for (size n = 0; n < NETWORKS; n++)
            for (size i = 1; i < NUMBERS; i++)
                e->totals[n][i] += e->numbers[n][i];
        e->norm = norm;
        take_step(e, norm);
    }
    return 0;
}
