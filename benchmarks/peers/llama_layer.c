// One routed-expert layer as llama.cpp computes it on the CPU: mul_mat_id of gate and up, SwiGLU, mul_mat_id of down,
// weighted sum. Weights lie in the repacked buffer type where ggml has one for their format. Used through ctypes.

#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

struct layer {
  int hidden, inner, experts, top_k, tokens, repacked;
  ggml_backend_t backend;
  struct ggml_threadpool *pool;
  struct ggml_context *weights;
  ggml_backend_buffer_t buffer;
  struct ggml_tensor *gate, *up, *down;
  struct ggml_context *graph_context;
  ggml_gallocr_t allocator;
  struct ggml_cgraph *graph;
  struct ggml_tensor *x, *ids, *route, *out;
};

static ggml_backend_buffer_type_t repack_type(void) {
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  ggml_backend_dev_get_extra_bufts_t extra = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
  for (ggml_backend_buffer_type_t *type = extra ? extra(device) : NULL; type && *type; ++type) {
    if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) return *type;
  }
  return NULL;
}

static void make_tensors(struct layer *l, enum ggml_type type, ggml_backend_buffer_type_t buffer_type) {
  struct ggml_init_params params = {8 * ggml_tensor_overhead(), NULL, true};
  l->weights = ggml_init(params);
  l->gate = ggml_new_tensor_3d(l->weights, type, l->hidden, l->inner, l->experts);
  l->up = ggml_new_tensor_3d(l->weights, type, l->hidden, l->inner, l->experts);
  l->down = ggml_new_tensor_3d(l->weights, type, l->inner, l->hidden, l->experts);
  l->buffer = ggml_backend_alloc_ctx_tensors_from_buft(l->weights, buffer_type);
}

// Random blocks whose scales are harmless: 17-byte MXFP4 blocks begin with one E8M0 byte, 144-byte Q4_K ones with two
// halves.
static void fill(struct ggml_tensor *tensor, enum ggml_type type) {
  const size_t size = ggml_nbytes(tensor);
  unsigned char *bytes = malloc(size);
  unsigned state = 12345;
  for (size_t i = 0; i < size; ++i) {
    state = state * 1664525u + 1013904223u;
    bytes[i] = (unsigned char)(state >> 24);
  }
  const size_t block = ggml_type_size(type);
  const ggml_fp16_t small = ggml_fp32_to_fp16(0.002f);
  for (size_t at = 0; at < size; at += block) {
    if (type == GGML_TYPE_MXFP4) {
      bytes[at] = (unsigned char)(118 + bytes[at] % 6);
    } else {
      memcpy(bytes + at, &small, 2);
      memcpy(bytes + at + 2, &small, 2);
    }
  }
  ggml_backend_tensor_set(tensor, bytes, 0, size);
  free(bytes);
}

struct layer *layer_new(int hidden, int inner, int experts, int top_k, const char *format, int threads) {
  const enum ggml_type type = strcmp(format, "mxfp4") == 0 ? GGML_TYPE_MXFP4 : GGML_TYPE_Q4_K;
  struct layer *l = calloc(1, sizeof *l);
  l->hidden = hidden, l->inner = inner, l->experts = experts, l->top_k = top_k;
  l->backend = ggml_backend_cpu_init();
  struct ggml_threadpool_params params = ggml_threadpool_params_default(threads);
  l->pool = ggml_threadpool_new(&params);
  ggml_backend_cpu_set_n_threads(l->backend, threads);
  ggml_backend_cpu_set_threadpool(l->backend, l->pool);
  ggml_backend_buffer_type_t repack = repack_type();
  if (repack) make_tensors(l, type, repack);
  l->repacked = repack && l->gate->extra && l->down->extra;
  if (!l->repacked) make_tensors(l, type, ggml_backend_cpu_buffer_type());
  fill(l->gate, type);
  fill(l->up, type);
  fill(l->down, type);
  return l;
}

int layer_repacked(const struct layer *l) {
  return l->repacked;
}

static void make_graph(struct layer *l, int tokens) {
  if (l->graph_context) {
    ggml_gallocr_free(l->allocator);
    ggml_free(l->graph_context);
  }
  l->tokens = tokens;
  struct ggml_init_params params = {64 * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true};
  struct ggml_context *c = l->graph_context = ggml_init(params);
  l->x = ggml_new_tensor_3d(c, GGML_TYPE_F32, l->hidden, 1, tokens);
  l->ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, l->top_k, tokens);
  l->route = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, l->top_k, tokens);
  ggml_set_input(l->x);
  ggml_set_input(l->ids);
  ggml_set_input(l->route);
  struct ggml_tensor *up = ggml_mul_mat_id(c, l->up, l->x, l->ids);
  struct ggml_tensor *gate = ggml_mul_mat_id(c, l->gate, l->x, l->ids);
  struct ggml_tensor *h = ggml_swiglu_split(c, gate, up);
  struct ggml_tensor *y = ggml_mul(c, ggml_mul_mat_id(c, l->down, h, l->ids), l->route);
  struct ggml_tensor *sum = ggml_view_2d(c, y, l->hidden, tokens, y->nb[2], 0);
  for (int k = 1; k < l->top_k; ++k) {
    sum = ggml_add(c, sum, ggml_view_2d(c, y, l->hidden, tokens, y->nb[2], k * y->nb[1]));
  }
  l->out = sum;
  ggml_set_output(l->out);
  l->graph = ggml_new_graph(c);
  ggml_build_forward_expand(l->graph, l->out);
  l->allocator = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
  ggml_gallocr_alloc_graph(l->allocator, l->graph);
}

// x [tokens][hidden], ids and route [tokens][top_k], out [tokens][hidden]. 0 on success.
int layer_run(struct layer *l, int tokens, const float *x, const int *ids, const float *route, float *out) {
  if (tokens != l->tokens) make_graph(l, tokens);
  ggml_backend_tensor_set(l->x, x, 0, ggml_nbytes(l->x));
  ggml_backend_tensor_set(l->ids, ids, 0, ggml_nbytes(l->ids));
  ggml_backend_tensor_set(l->route, route, 0, ggml_nbytes(l->route));
  if (ggml_backend_graph_compute(l->backend, l->graph) != GGML_STATUS_SUCCESS) return 1;
  ggml_backend_tensor_get(l->out, out, 0, ggml_nbytes(l->out));
  return 0;
}
