/* Forward and backward passes of multilayer perceptrons, and Adam. */
#include <math.h>

#include "kernels.h"

#define BLOCK_ROWS 16
#define BLOCK_PARAMETERS 4096

/* The version and the sizes of the structures, which library.py compares with its own. */
#define VERSION 8
const size rlflame_layout[] = {VERSION, sizeof(functions), sizeof(network), sizeof(distribution),
                               sizeof(minibatch), sizeof(mailbox), sizeof(epoch),
                               sizeof(adam_step), sizeof(sac_lane)};

/* Transpose a matrix [rows, columns] in blocks of rows, which stay in the processor's cache. */
void transpose(const float *x, float *out, size rows, size columns)
{
    for (size first = 0; first < rows; first += BLOCK_ROWS) {
        const size end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
        for (size column = 0; column < columns; column++)
            for (size row = first; row < end; row++)
                out[column * rows + row] = x[row * columns + column];
    }
}

/* Add the rows of a matrix [count, rows]. */
VECTORISED void add_rows(const float *x, float *total, size count, size rows)
{
    memcpy(total, x, (size_t)rows * sizeof(float));
    for (size i = 1; i < count; i++)
        for (size row = 0; row < rows; row++)
            total[row] += x[i * rows + row];
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
            apply_binary(&f->maximum, out, net->zeros, out, units * rows);
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

/* Write the gradient of a layer's parameters, given d(loss)/d(its outputs before activation). */
void write_gradient(const functions *f, const network *net, size layer, const float *upstream)
{
    const size rows = net->rows, fan_in = net->sizes[layer] + 1, units = net->sizes[layer + 1];
    const float *inputs = net->inputs[layer];
    if (units == 1)
        f->multiply_vector(ROW_MAJOR, PLAIN, fan_in, rows, 1.0f, inputs, rows, upstream, 1, 0.0f,
                           net->gradients[layer], 1);
    else
        multiply(f, PLAIN, TRANSPOSED, fan_in, units, rows, inputs, rows, upstream, rows,
                 net->gradients[layer]);
}

/* Write the gradients of all parameters, given d(loss)/d(output). */
void rlflame_backward(const functions *f, const network *net, const float *upstream)
{
    for (size layer = net->layers - 1; layer > 0; layer--) {
        write_gradient(f, net, layer, upstream);
        rlflame_backward_layer(f, net, layer, upstream);
        upstream = net->deltas[layer - 1];
    }
    write_gradient(f, net, 0, upstream);
}

VECTORISED static void move(const adam_step *s, size start, size end)
{
    const float *gradient = s->gradient;
    float *parameters = s->parameters, *first = s->first, *second = s->second;
    for (size i = start; i < end; i++) {
        first[i] = first[i] + (gradient[i] - first[i]) * s->to_first;
        second[i] = second[i] + (gradient[i] * gradient[i] - second[i]) * s->to_second;
        parameters[i] = parameters[i] - first[i] / (sqrtf(second[i]) + s->epsilon) * s->rate;
    }
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

VECTORISED static void move_targets(const adam_step *s, size start, size end)
{
    const float *parameters = s->parameters;
    float *targets = s->targets;
    for (size i = start; i < end; i++)
        targets[i] = targets[i] + (parameters[i] - targets[i]) * s->target_rate;
}

/* Take a step of Adam. */
void rlflame_step_adam(const functions *f, const adam_step *step)
{
    (void)f;
    /* Each block stays in the processor's cache through all operations. */
    for (size start = 0; start < step->count; start += BLOCK_PARAMETERS) {
        const size rest = step->count - start;
        const size end = start + (rest < BLOCK_PARAMETERS ? rest : BLOCK_PARAMETERS);
        move(step, start, end);
        if (step->targets)
            move_targets(step, start, end);
    }
    if (step->drops_still)
        drop_still_moments(step->first, step->second, step->count);
}
