// The Python binding, and the only native file that knows of Python. Arrays arrive checked by moetier.kernels.cpu.

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/experts.h"
#include "core/measure.h"
#include "python/bound_experts.h"

namespace nb = nanobind;

void bind_mailbox(nb::module_ &module);  // mailbox.cpp
void bind_protocol(nb::module_ &module); // protocol.cpp

namespace {

using moetier::BoundExperts;
using moetier::StepError;
using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using ConstArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const char *describe(StepError error) {
  switch (error) {
  case StepError::no_step: return "no step is open: call begin first, and once per finish";
  case StepError::bad_index: return "an expert index lies outside the list that begin returned";
  case StepError::gate_up_twice: return "gate_up was called twice for an expert of this step";
  case StepError::gate_up_absent: return "down was called for an expert before its gate_up";
  case StepError::down_order: return "down must take the experts in ascending order without gaps, each once";
  case StepError::unfinished: return "finish was called before every routed expert had its down";
  case StepError::bad_address: return "a record's address must be a multiple of 64 and not 0";
  case StepError::none: break;
  }
  return "unknown";
}

void check(StepError error) {
  if (error == StepError::none) return;
  if (error == StepError::bad_address) throw nb::value_error(describe(error));
  throw std::runtime_error(describe(error));
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> copy(std::span<const T> values) {
  T *data = new T[values.size()];
  std::copy(values.begin(), values.end(), data);
  nb::capsule owner(data, [](void *p) noexcept { delete[] static_cast<T *>(p); });
  return {data, {values.size()}, owner};
}

moetier::StepInput step_input(const ConstArray &x, const ConstArray &ids, const ConstArray &weights) {
  moetier::StepInput input{};
  if (x.dtype() == nb::dtype<float>()) {
    input.x_f32 = static_cast<const float *>(x.data());
  } else {
    input.x_bf16 = static_cast<const std::uint16_t *>(x.data());
  }
  if (ids.dtype() == nb::dtype<std::int32_t>()) {
    input.ids32 = static_cast<const std::int32_t *>(ids.data());
  } else {
    input.ids64 = static_cast<const std::int64_t *>(ids.data());
  }
  input.weights = static_cast<const float *>(weights.data());
  input.tokens = x.shape(0);
  return input;
}

template <typename T, typename A>
std::span<const T> as_span(const A &array) {
  return {static_cast<const T *>(array.data()), array.size()};
}

const moetier::Kernels &kernels_named(const std::string &isa) {
  const moetier::Kernels *kernels = moetier::find_kernels(isa);
  if (kernels == nullptr) throw nb::value_error("this machine lacks the instruction set asked for");
  return *kernels;
}

nb::tuple listed(const moetier::Experts &experts) {
  return nb::make_tuple(copy<std::int32_t>(experts.ids()), copy<std::int32_t>(experts.counts()));
}

} // namespace

NB_MODULE(_native, module) {
  module.doc() = "CPU kernels of moetier; use moetier.kernels.cpu, which checks what is passed in.";

  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const moetier::Kernels *kernels : moetier::built_kernels()) {
      if (kernels->available()) names.emplace_back(kernels->name);
    }
    return names;
  });

  nb::class_<moetier::ThreadPool>(module, "Pool")
      .def(nb::init<int, std::vector<std::vector<int>>>(), nb::arg("threads"), nb::arg("cpus"))
      .def_prop_ro("threads", &moetier::ThreadPool::threads);

  module.def(
      "read_rate",
      [](moetier::ThreadPool &pool, const std::string &isa, std::size_t way, const ConstArray &memory) {
        const moetier::Kernels &kernels = kernels_named(isa);
        const std::span<const std::uint8_t> bytes = as_span<std::uint8_t>(memory);
        if (way >= moetier::kReadWays) throw nb::value_error("way: expected 0 to READ_WAYS - 1");
        nb::gil_scoped_release unlocked;
        return moetier::read_rate(pool, kernels, way, bytes);
      },
      nb::arg("pool"), nb::arg("isa"), nb::arg("way"), nb::arg("memory"));
  module.attr("READ_WAYS") = moetier::kReadWays;
  module.def(
      "multiply_rate",
      [](moetier::ThreadPool &pool, const std::string &isa) {
        const moetier::Kernels &kernels = kernels_named(isa);
        nb::gil_scoped_release unlocked;
        return moetier::multiply_rate(pool, kernels);
      },
      nb::arg("pool"), nb::arg("isa"));

  module.def(
      "start_time",
      [](moetier::ThreadPool &pool, double idle) {
        const std::chrono::nanoseconds time(static_cast<std::int64_t>(idle * 1e9));
        nb::gil_scoped_release unlocked;
        return moetier::start_time(pool, time);
      },
      nb::arg("pool"), nb::arg("idle"));

  nb::class_<BoundExperts>(module, "Experts")
      .def(
          "__init__",
          [](BoundExperts *self, moetier::ThreadPool &pool, const std::string &isa, std::size_t hidden,
             std::size_t inner, std::size_t experts, std::size_t top_k, std::size_t first_slice, std::size_t slices,
             std::size_t max_tokens, std::optional<float> limit, bool weighted, std::optional<bool> prefetch) {
            const moetier::Prefetch how = !prefetch   ? moetier::best_prefetch()
                                          : *prefetch ? moetier::Prefetch::by_instructions
                                                      : moetier::Prefetch::by_processor;
            new (self) BoundExperts({hidden, inner, experts, top_k, first_slice, slices, max_tokens},
                                    {limit.has_value(), limit.value_or(0.0F), weighted}, pool, kernels_named(isa), how);
          },
          nb::keep_alive<1, 2>(), nb::arg("pool"), nb::arg("isa"), nb::arg("hidden"), nb::arg("inner"),
          nb::arg("experts"), nb::arg("top_k"), nb::arg("first_slice"), nb::arg("slices"), nb::arg("max_tokens"),
          nb::arg("limit").none(), nb::arg("weighted"), nb::arg("prefetch").none())
      .def_prop_ro("workspace_bytes", [](const BoundExperts &self) { return self.experts().workspace_bytes(); })
      .def_prop_ro("bad_rows", [](const BoundExperts &self) { return self.experts().bad_rows(); })
      .def("begin",
           [](BoundExperts &self, const ConstArray &x, const ConstArray &ids, const ConstArray &weights) {
             const moetier::StepInput input = step_input(x, ids, weights);
             self.exclusively([&](moetier::Experts &experts) { experts.begin(input); });
             return listed(self.experts());
           })
      .def("gate_up",
           [](BoundExperts &self, const Indices &indices, const Addresses &addresses) {
             check(self.exclusively([&](moetier::Experts &experts) {
               return experts.gate_up(as_span<std::int32_t>(indices), as_span<std::uint64_t>(addresses));
             }));
           })
      .def("down",
           [](BoundExperts &self, std::size_t first, const Addresses &addresses) {
             check(self.exclusively(
                 [&](moetier::Experts &experts) { return experts.down(first, as_span<std::uint64_t>(addresses)); }));
           })
      .def("finish",
           [](BoundExperts &self, const Array &out) {
             auto *bits = static_cast<std::uint16_t *>(out.data());
             check(self.exclusively([&](moetier::Experts &experts) { return experts.finish(bits); }));
           })
      .def("tokens", [](const BoundExperts &self) { return self.experts().tokens(); })
      // (experts, counts, indices of absent experts); nothing was computed where the last is not empty.
      .def("forward",
           [](BoundExperts &self, const ConstArray &x, const ConstArray &ids, const ConstArray &weights,
              const Addresses &addresses, const Array &out) {
             const moetier::StepInput input = step_input(x, ids, weights);
             auto *bits = static_cast<std::uint16_t *>(out.data());
             check(self.exclusively([&](moetier::Experts &experts) {
               return experts.forward(input, as_span<std::uint64_t>(addresses), bits);
             }));
             const std::vector<std::int32_t> &absent = self.experts().absent();
             return nb::make_tuple(copy<std::int32_t>(self.experts().ids()),
                                   copy<std::int32_t>(self.experts().counts()),
                                   copy<std::int32_t>(std::span<const std::int32_t>(absent)));
           })
      .def("rows", [](BoundExperts &self, const ConstArray &x, const ConstArray &ids, const ConstArray &weights,
                      const Addresses &addresses, const Array &out) {
        const moetier::StepInput input = step_input(x, ids, weights);
        auto *rows = static_cast<float *>(out.data());
        std::vector<std::int32_t> ids_found, counts; // copied in the turn: afterwards the object is anybody's
        check(self.exclusively([&](moetier::Experts &experts) {
          const StepError error = experts.rows(input, as_span<std::uint64_t>(addresses), rows);
          ids_found.assign(experts.ids().begin(), experts.ids().end());
          counts.assign(experts.counts().begin(), experts.counts().end());
          return error;
        }));
        return nb::make_tuple(copy<std::int32_t>(std::span<const std::int32_t>(ids_found)),
                              copy<std::int32_t>(std::span<const std::int32_t>(counts)));
      });

  bind_mailbox(module);
  bind_protocol(module);
}
