// The binding of the mailbox's thread. Pointers arrive as integers: the arrays are pinned memory that Python allocated.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "core/mailbox.h"
#include "python/bound_experts.h"

namespace nb = nanobind;

namespace {

using moetier::BoundExperts;
using moetier::Mailbox;

template <typename T>
T *pointer(std::uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

} // namespace

void bind_mailbox(nb::module_ &module) {
  nb::class_<Mailbox>(module, "Mailbox")
      .def(
          "__init__",
          [](Mailbox *self, moetier::ThreadPool &pool, BoundExperts &experts, std::size_t top_k, std::size_t count,
             std::uintptr_t box, std::uintptr_t ids, std::uintptr_t weights, std::uintptr_t x, std::uintptr_t rows,
             const std::vector<std::uintptr_t> &tables, const std::vector<int> &cpus) {
            std::vector<const std::uint64_t *> addresses;
            for (const std::uintptr_t table : tables) addresses.push_back(pointer<const std::uint64_t>(table));
            const auto compute = [&experts](const moetier::StepInput &input, std::span<const std::uint64_t> here,
                                            float *out) {
              try {
                const BoundExperts::Turn turn(experts);
                return turn.experts().rows(input, here, out) == moetier::StepError::none;
              } catch (const std::exception &) {
                return false;
              }
            };
            new (self) Mailbox({pointer<Box>(box), pointer<const std::int32_t>(ids), pointer<const float>(weights),
                                pointer<const std::uint16_t>(x), pointer<float>(rows)},
                               top_k, count, std::move(addresses), pool, compute, cpus);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("pool"), nb::arg("kernel"), nb::arg("top_k"),
          nb::arg("experts"), nb::arg("box"), nb::arg("ids"), nb::arg("weights"), nb::arg("x"), nb::arg("rows"),
          nb::arg("tables"), nb::arg("cpus"))
      .def("wake", &Mailbox::wake)
      .def("await_help",
           [](Mailbox &self, int milliseconds) {
             const nb::gil_scoped_release unlocked;
             return self.await_help(std::chrono::milliseconds(milliseconds));
           })
      .def("answer", &Mailbox::answer)
      .def("refuse", &Mailbox::refuse)
      .def("counts",
           [](const Mailbox &self) {
             const Mailbox::Counts counts = self.counts();
             return nb::make_tuple(counts.calls, counts.nanoseconds, counts.helps);
           })
      .def("layer_nanoseconds", &Mailbox::nanoseconds)
      .def("close", [](Mailbox &self) {
        const nb::gil_scoped_release unlocked;
        self.close();
      });
}
