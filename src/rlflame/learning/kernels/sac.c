/* The networks' share of an update of SAC, in two lanes that may run in two threads. */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "kernels.h"

/* The number of rounds of spinning, about 2 µs each, before a thread sleeps. Waking a thread takes
 * longer than most of the code between two calls. */
#define SPINS 200

typedef void (*lane_function)(const functions *, const void *);

/* A second thread, which runs the second lane of each call. */
typedef struct {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    size started, finished;
    /* Whether a call uses the helper; another call then runs both lanes itself. */
    size is_busy;
    /* The current work, or null to end the thread. */
    lane_function work;
    const functions *f;
    const void *argument;
} helper;

static void advance(helper *h, size *counter)
{
    pthread_mutex_lock(&h->mutex);
    __atomic_store_n(counter, *counter + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->mutex);
}

static void wait_for(helper *h, const size *counter, size value)
{
    for (int i = 0; i < SPINS; i++) {
        for (int j = 0; j < 50; j++) {
            if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) == value)
                return;
            PAUSE();
        }
        sched_yield();
    }
    pthread_mutex_lock(&h->mutex);
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) != value)
        pthread_cond_wait(&h->changed, &h->mutex);
    pthread_mutex_unlock(&h->mutex);
}

static void *serve(void *address)
{
    helper *h = address;
    for (size number = 1;; number++) {
        wait_for(h, &h->started, number);
        if (!h->work)
            return NULL;
        h->work(h->f, h->argument);
        advance(h, &h->finished);
    }
}

static void discard(helper *h)
{
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->mutex);
    free(h);
}

/* Start a second thread, which receives no signals; return null if that fails. */
helper *rlflame_start_helper(void)
{
    helper *h = calloc(1, sizeof(helper));
    sigset_t all, previous;
    if (!h)
        return NULL;
    pthread_mutex_init(&h->mutex, NULL);
    pthread_cond_init(&h->changed, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    const int error = pthread_create(&h->thread, NULL, serve, h);
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    if (error) {
        discard(h);
        return NULL;
    }
    return h;
}

void rlflame_stop_helper(helper *h)
{
    h->work = NULL;
    advance(h, &h->started);
    pthread_join(h->thread, NULL);
    discard(h);
}

/* Start work in the helper's thread; return 0 if there is no idle helper. */
static int start(const functions *f, helper *h, lane_function work, const void *argument)
{
    if (!h || __atomic_exchange_n(&h->is_busy, 1, __ATOMIC_ACQUIRE))
        return 0;
    h->work = work;
    h->f = f;
    h->argument = argument;
    advance(h, &h->started);
    return 1;
}

static void finish(helper *h)
{
    wait_for(h, &h->finished, h->started);
    __atomic_store_n(&h->is_busy, 0, __ATOMIC_RELEASE);
}

/* Run both lanes, the second one in the helper's thread if the helper is idle. */
void rlflame_run_lanes(const functions *f, helper *h, lane_function work, const void *first,
                       const void *second)
{
    const int is_started = start(f, h, work, second);
    work(f, first);
    if (is_started)
        finish(h);
    else
        work(f, second);
}

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

/* A layer of a backward pass. */
typedef struct {
    const network *net;
    size layer;
    const float *upstream;
} pass;

static void write_pass_gradient(const functions *f, const void *address)
{
    const pass *p = address;
    write_gradient(f, p->net, p->layer, p->upstream);
}

/* Write the same gradients as `rlflame_backward`. If the helper is idle, it computes the gradients of
 * the weights. */
void rlflame_backward_with_helper(const functions *f, helper *h, const network *net,
                                  const float *upstream)
{
    for (size layer = net->layers - 1; layer >= 0; layer--) {
        const pass p = {net, layer, upstream};
        const int is_started = layer > 0 && start(f, h, write_pass_gradient, &p);
        if (!is_started)
            write_pass_gradient(f, &p);
        if (layer > 0) {
            rlflame_backward_layer(f, net, layer, upstream);
            upstream = net->deltas[layer - 1];
        }
        if (is_started)
            finish(h);
    }
}
