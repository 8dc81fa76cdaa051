/* The loss of PPO, and its loop over the minibatches of an epoch. */
#include <math.h>
#include <sched.h>

#include "kernels.h"

VECTORISED static void standardise_actions(const distribution *head, const float *actions,
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

VECTORISED static size compute_objective(const distribution *head, const minibatch *batch,
                                         size rows)
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

VECTORISED static void scale_z(const distribution *head, size rows)
{
    for (size action = 0; action < head->actions; action++)
        for (size row = 0; row < rows; row++)
            head->z[action * rows + row] =
                head->z[action * rows + row] * head->slope[row] * head->inverse[action];
}

/* Write the log-probabilities of Gaussians; return the negative log-density at the mean. */
static double compute_density(const functions *f, const distribution *head, const float *means,
                              const float *actions, double log_volume_constant, size rows)
{
    const double log_volume =
        (double)add_up(f, head->log_std, head->actions) + log_volume_constant;
    for (size action = 0; action < head->actions; action++)
        head->inverse[action] = -head->log_std[action];
    apply_unary(&f->exp, head->inverse, head->inverse, head->actions);
    standardise_actions(head, actions, means, rows);
    add_rows(head->squares, head->log_probs, head->actions, rows);
    for (size row = 0; row < rows; row++)
        head->log_probs[row] = head->log_probs[row] * -0.5f - (float)log_volume;
    return log_volume;
}

/* Write d(loss)/d(means) to z, and the gradient of the log standard deviations. */
static void backward_density(const functions *f, const distribution *head, float entropy_slope,
                             size rows)
{
    const size actions = head->actions;
    if (actions == 1)
        head->log_std_gradient[0] = f->dot(rows, head->squares, 1, head->slope, 1);
    else
        f->multiply_vector(ROW_MAJOR, PLAIN, actions, rows, 1.0f, head->squares, rows, head->slope,
                           1, 0.0f, head->log_std_gradient, 1);
    const float common = entropy_slope - add_up(f, head->slope, rows);
    for (size action = 0; action < actions; action++)
        head->log_std_gradient[action] += common;
    scale_z(head, rows);
}

VECTORISED static void subtract_row(const float *x, const float *row, float *out, size count,
                                    size rows)
{
    for (size i = 0; i < count; i++)
        for (size j = 0; j < rows; j++)
            out[i * rows + j] = x[i * rows + j] - row[j];
}

VECTORISED static void divide_by_row(float *x, const float *row, size count, size rows)
{
    for (size i = 0; i < count; i++)
        for (size j = 0; j < rows; j++)
            x[i * rows + j] = x[i * rows + j] / row[j];
}

/* Write the log-probabilities of choices. */
static void compute_choice(const functions *f, const distribution *head, const float *logits,
                           const int64_t *actions, size rows)
{
    const size count = head->actions;
    float *total = head->log_probs;
    memcpy(total, logits, (size_t)rows * sizeof(float));
    for (size i = 1; i < count; i++)
        apply_binary(&f->maximum, total, logits + i * rows, total, rows);
    subtract_row(logits, total, head->log_softmax, count, rows);
    apply_unary(&f->exp, head->log_softmax, head->softmax, count * rows);
    add_rows(head->softmax, total, count, rows);
    divide_by_row(head->softmax, total, count, rows);
    apply_unary(&f->log, total, total, rows);
    subtract_row(head->log_softmax, total, head->log_softmax, count, rows);
    for (size row = 0; row < rows; row++)
        total[row] = head->log_softmax[actions[row] * rows + row];
}

VECTORISED static void scale_softmax(const distribution *head, size rows)
{
    for (size i = 0; i < head->actions; i++)
        for (size row = 0; row < rows; row++)
            head->upstream[i * rows + row] = head->softmax[i * rows + row] * -head->slope[row];
}

VECTORISED static void subtract_entropy_slopes(const distribution *head, float entropy_slope,
                                               float *total, size rows)
{
    const size count = head->actions;
    float *terms = head->terms;
    for (size i = 0; i < count * rows; i++)
        terms[i] = head->softmax[i] * head->log_softmax[i];
    add_rows(terms, total, count, rows);
    for (size i = 0; i < count; i++)
        for (size row = 0; row < rows; row++) {
            const size place = i * rows + row;
            terms[place] = (terms[place] - head->softmax[place] * total[row]) * entropy_slope;
            head->upstream[place] = head->upstream[place] - terms[place];
        }
}

/* Write d(loss)/d(logits) to `upstream`. */
static void backward_choice(const distribution *head, const int64_t *actions, float entropy_slope,
                            size rows)
{
    scale_softmax(head, rows);
    for (size row = 0; row < rows; row++)
        head->upstream[actions[row] * rows + row] += head->slope[row];
    if (entropy_slope != 0.0f)
        subtract_entropy_slopes(head, entropy_slope, head->log_probs, rows);
}

/* Write the actor's gradient. Sums: objective, negative entropy, KL estimate, clipped ratios. */
void rlflame_policy_gradient(const functions *f, const network *net, const distribution *head,
                             const minibatch *batch, double log_volume_constant, double *sums)
{
    const size rows = net->rows, cells = head->actions * rows;
    double log_volume = 0.0;
    rlflame_forward(f, net, batch->observations);
    if (head->is_choice)
        compute_choice(f, head, net->out, batch->actions, rows);
    else
        log_volume =
            compute_density(f, head, net->out, batch->actions, log_volume_constant, rows);
    for (size row = 0; row < rows; row++)
        head->log_ratio[row] = head->log_probs[row] - batch->log_probs[row];
    apply_unary(&f->exp, head->log_ratio, head->ratio, rows);
    sums[3] = (double)compute_objective(head, batch, rows);
    if (head->is_choice) {
        backward_choice(head, batch->actions, batch->entropy_slope, rows);
        rlflame_backward(f, net, head->upstream);
        sums[1] = (double)f->dot(cells, head->softmax, 1, head->log_softmax, 1);
    } else {
        backward_density(f, head, batch->entropy_slope, rows);
        rlflame_backward(f, net, head->z);
        sums[1] = -((double)rows * (log_volume + 0.5 * (double)head->actions));
    }
    sums[0] = add_up(f, head->objective, rows);
    sums[2] = add_up(f, head->ratio, rows);
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

VECTORISED static void scale(float *x, float factor, size count)
{
    for (size i = 0; i < count; i++)
        x[i] = x[i] * factor;
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
        if (e->head->is_choice)
            batch.actions = (const int64_t *)batch.actions + first_row;
        else
            batch.actions = (const float *)batch.actions + first_row * e->head->actions;
        batch.log_probs += first_row;
        batch.advantages += first_row;
        rlflame_policy_gradient(f, e->networks[0], e->head, &batch, e->log_volume_constant, parts);
        sums[0][1] = -parts[0];
        sums[0][2] = parts[1];
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
static void take_step(const functions *f, epoch *e, double norm)
{
    for (size n = 0; n < NETWORKS; n++) {
        const size start = e->starts[n], count = e->ends[n] - start;
        if (!e->owns[n])
            continue;
        if (e->has_max_norm && norm > e->max_norm)
            scale(e->total + start, (float)(e->max_norm / (norm + 1e-6)), count);
        const adam_step step = {
            .parameters = e->parameters + start, .gradient = e->total + start,
            .first = e->first + start, .second = e->second + start, .count = count,
            .drops_still = (e->steps + 1) % 64 == 0, .to_first = (float)(1 - 0.9),
            .to_second = (float)(1 - 0.999), .rate = *e->rates, .epsilon = *e->epsilons,
        };
        rlflame_step_adam(f, &step);
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
        take_step(f, e, norm);
    }
    return 0;
}
