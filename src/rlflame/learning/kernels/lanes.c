/* A second thread, and the work that is divided between two threads. */
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
