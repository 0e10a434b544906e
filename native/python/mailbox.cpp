// The binding of the mailbox's thread. Pointers arrive as integers: the arrays are pinned memory that Python allocated.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "core/mailbox.h"
#include "core/xxh3.h"
#include "python/bound_experts.h"

namespace nb = nanobind;

namespace {

using moetier::BoundExperts;
using moetier::Mailbox;

template <typename T>
T *pointer(std::uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

// The dictionary of kernels/cpu/mailbox.py's `Alone`.
std::unique_ptr<Mailbox::Alone> alone_of(const nb::dict &given) {
  const auto number = [&](const char *name) { return nb::cast<std::size_t>(given[name]); };
  auto alone = std::make_unique<Mailbox::Alone>();
  moetier::RecordFiles &records = alone->records;
  records.files = nb::cast<std::vector<int>>(given["files"]);
  for (const std::uintptr_t sums : nb::cast<std::vector<std::uintptr_t>>(given["sums"]))
    records.sums.push_back(pointer<const std::uint64_t>(sums));
  records.stride = number("stride"), records.start = number("start"), records.bytes = number("bytes");
  records.shift = number("shift"), records.used = number("used"), records.slices = number("slices");
  records.first_slice = number("first_slice"), records.slice_bytes = number("slice_bytes");
  alone->stuck = std::chrono::milliseconds(number("stuck_ms"));
  return alone;
}

} // namespace

void bind_mailbox(nb::module_ &module) {
  module.def("xxh3_64", [](const nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> &data) {
    return moetier::xxh3::hash(data.data(), data.size());
  });
  nb::class_<Mailbox>(module, "Mailbox")
      .def(
          "__init__",
          [](Mailbox *self, moetier::ThreadPool &pool, BoundExperts &experts, std::size_t top_k, std::size_t count,
             std::uintptr_t box, std::uintptr_t ids, std::uintptr_t weights, std::uintptr_t x, std::uintptr_t rows,
             std::size_t hidden, const std::vector<std::uintptr_t> &tables, const std::vector<int> &cpus,
             std::optional<nb::dict> alone) {
            std::vector<std::uint64_t *> addresses;
            for (const std::uintptr_t table : tables) addresses.push_back(pointer<std::uint64_t>(table));
            const auto compute = [&experts](const moetier::StepInput &input, std::span<const std::uint64_t> here,
                                            float *out) {
              try {
                const BoundExperts::Turn turn(experts);
                return turn.experts().rows(input, here, out) == moetier::StepError::none;
              } catch (const std::exception &) {
                return false;
              }
            };
            new (self)
                Mailbox({pointer<Box>(box), pointer<const std::int32_t>(ids), pointer<const float>(weights),
                         pointer<const std::uint16_t>(x), pointer<float>(rows), hidden},
                        top_k, count, std::move(addresses), pool, compute, cpus, alone ? alone_of(*alone) : nullptr);
          },
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("pool"), nb::arg("kernel"), nb::arg("top_k"),
          nb::arg("experts"), nb::arg("box"), nb::arg("ids"), nb::arg("weights"), nb::arg("x"), nb::arg("rows"),
          nb::arg("hidden"), nb::arg("tables"), nb::arg("cpus"), nb::arg("alone").none())
      .def("wake", &Mailbox::wake)
      .def("await_help",
           [](Mailbox &self, int milliseconds) {
             const nb::gil_scoped_release unlocked;
             return self.await_help(std::chrono::milliseconds(milliseconds));
           })
      .def("answer", [](Mailbox &self, std::uint32_t request,
                        std::uintptr_t rows) { return self.answer(request, pointer<const float>(rows)); })
      .def("refuse", &Mailbox::refuse)
      .def("forget", &Mailbox::forget)
      .def("progress", &Mailbox::progress)
      .def("counts",
           [](const Mailbox &self) {
             const Mailbox::Counts counts = self.counts();
             return nb::make_tuple(counts.calls, counts.nanoseconds, counts.helps, counts.alone);
           })
      .def("layer_nanoseconds", &Mailbox::nanoseconds)
      .def("close", [](Mailbox &self) {
        const nb::gil_scoped_release unlocked;
        self.close();
      });
}
