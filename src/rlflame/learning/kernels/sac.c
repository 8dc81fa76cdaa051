/* The networks' share of an update of SAC, in two lanes that may run in two threads. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "kernels.h"

/* The number of rounds of spinning, about 2 µs each, before a thread sleeps. Waking a thread takes
 * longer than most of the code between two calls. */
#define SPINS 200

typedef void (*work)(const functions *, const void *);

/* A second thread, which runs the second lane of each call. */
typedef struct {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    size started, finished;
    /* The current work, or null to end the thread. */
    work work;
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

/* Start a second thread; return null if that fails. */
helper *rlflame_start_helper(void)
{
    helper *h = calloc(1, sizeof(helper));
    if (!h)
        return NULL;
    pthread_mutex_init(&h->mutex, NULL);
    pthread_cond_init(&h->changed, NULL);
    if (pthread_create(&h->thread, NULL, serve, h)) {
        free(h);
        return NULL;
    }
    return h;
}

void rlflame_stop_helper(helper *h)
{
    h->work = NULL;
    advance(h, &h->started);
    pthread_join(h->thread, NULL);
    free(h);
}

/* Start work in the helper's thread, or do it now if there is no helper. */
static void start(const functions *f, helper *h, work work, const void *argument)
{
    if (!h) {
        work(f, argument);
        return;
    }
    h->work = work;
    h->f = f;
    h->argument = argument;
    advance(h, &h->started);
}

static void finish(helper *h)
{
    if (h)
        wait_for(h, &h->finished, h->started);
}

/* Run both lanes, the second one in the helper's thread. */
void rlflame_run_lanes(const functions *f, helper *h, work work, const void *first,
                       const void *second)
{
    start(f, h, work, second);
    work(f, first);
    finish(h);
}

/* Compute the outputs of a lane's actor. */
void rlflame_sac_act(const functions *f, const sac_lane *lane)
{
    rlflame_forward(f, lane->actor, lane->actor_observations);
}

/* Copy a critic's observations to its inputs; return the inputs for actions. */
static float *write_observations(const sac_lane *lane, const network *net, const float *observations)
{
    const size units = lane->actor->sizes[0];
    transpose(observations, net->inputs[0], net->rows, units);
    return net->inputs[0] + units * net->rows;
}

static void evaluate(const functions *f, const sac_lane *lane, const network *net,
                     const float *observations, const float *policy_actions)
{
    const size count = (net->sizes[0] - lane->actor->sizes[0]) * net->rows;
    memcpy(write_observations(lane, net, observations), policy_actions, (size_t)count * sizeof(float));
    rlflame_forward(f, net, NULL);
}

/* Compute the values of a lane's critic, and the next values of its target. */
void rlflame_sac_evaluate(const functions *f, const sac_lane *lane)
{
    const network *critic = lane->critic;
    evaluate(f, lane, lane->target, lane->next_observations, lane->next_policy_actions);
    transpose(lane->actions, write_observations(lane, critic, lane->observations), critic->rows,
              critic->sizes[0] - lane->actor->sizes[0]);
    rlflame_forward(f, critic, NULL);
}

/* Write the gradients of a lane's critic. */
void rlflame_sac_learn(const functions *f, const sac_lane *lane)
{
    rlflame_backward(f, lane->critic, lane->upstream);
}

/* Compute the values of the sampled actions. */
void rlflame_sac_judge(const functions *f, const sac_lane *lane)
{
    evaluate(f, lane, lane->critic, lane->observations, lane->policy_actions);
}

/* Write d(loss)/d(sampled actions), given d(loss)/d(their values). */
void rlflame_sac_improve(const functions *f, const sac_lane *lane)
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

/* Write the same gradients as `rlflame_backward`, the gradients of weights in the helper's thread. */
void rlflame_backward_with_helper(const functions *f, helper *h, const network *net,
                                  const float *upstream)
{
    for (size layer = net->layers - 1; layer >= 0; layer--) {
        const pass p = {net, layer, upstream};
        start(f, h, write_pass_gradient, &p);
        if (layer > 0) {
            rlflame_backward_layer(f, net, layer, upstream);
            upstream = net->deltas[layer - 1];
        }
        finish(h);
    }
}
