#include "core/mailbox.h"

#include <algorithm>
#include <cstddef>

namespace moetier {
namespace {

using Clock = std::chrono::steady_clock;

std::uint32_t load(const unsigned &word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

void store(unsigned &word, std::uint32_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

} // namespace

static_assert(offsetof(Box, answered) == 64 && offsetof(Box, refused) == 68 && sizeof(Box) == 128);

constexpr std::size_t kPage = 4096;

Mailbox::Mailbox(const Mail &mail, std::size_t top_k, std::size_t experts, std::vector<std::uint64_t *> tables,
                 ThreadPool &pool, Compute compute, const std::vector<int> &cpus, std::unique_ptr<Alone> alone)
    : mail_(mail), top_k_(top_k), experts_(experts), tables_(std::move(tables)), pool_(pool),
      compute_(std::move(compute)), alone_(std::move(alone)), room_(alone_ ? alone_->records.bytes + kPage : 0),
      layer_nanoseconds_(tables_.size()), meeting_(std::make_unique<Meeting>()) {
  pool_.demand_usable(); // so that whoever may use the pool may use this, too
  meeting_->thread = std::thread([this, cpus] {
    allow_cpus(cpus);
    work();
  });
}

Mailbox::~Mailbox() {
  close();
  if (!pool_.usable()) (void)meeting_.release();
}

Mailbox::Meeting &Mailbox::meeting() const {
  pool_.demand_usable();
  return *meeting_;
}

void Mailbox::close() {
  if (!pool_.usable()) return;
  Meeting &meet = *meeting_;
  {
    const std::lock_guard lock(meet.mutex); // else serve() could look at stop_ before and sleep after
    stop_.store(true);
  }
  meet.changed.notify_all();
  if (meet.thread.joinable()) meet.thread.join();
}

void Mailbox::wake() {
  Meeting &meet = meeting();
  pool_.stay_awake(kAwake);
  {
    const std::lock_guard lock(meet.mutex);
    meet.awake = true;
  }
  meet.changed.notify_all();
}

void Mailbox::work() {
  Meeting &meet = *meeting_;
  std::uint32_t done = load(mail_.box->answered);
  auto last = Clock::now();
  while (!stop_.load(std::memory_order_relaxed)) {
    const std::uint32_t posted = load(mail_.box->posted);
    if (posted != done) {
      serve(posted);
      done = posted;
      pool_.stay_awake(kAwake);
      last = Clock::now();
      continue;
    }
    for (int turn = 0; turn < 64; ++turn) {
      if (load(mail_.box->posted) != done) break;
      relax();
    }
    if (Clock::now() - last < kAwake) continue;
    std::unique_lock lock(meet.mutex);
    if (meet.changed.wait_for(lock, kNap, [&] { return meet.awake || stop_.load(); })) last = Clock::now();
    meet.awake = false;
  }
}

bool Mailbox::all_here(std::span<const std::uint64_t> addresses, std::size_t pairs) const {
  for (std::size_t p = 0; p < pairs; ++p) {
    const std::int32_t id = mail_.ids[p];
    if (id >= 0 && static_cast<std::size_t>(id) < experts_ && addresses[static_cast<std::size_t>(id)] == 0)
      return false;
  }
  return true;
}

void Mailbox::serve(std::uint32_t request) {
  const auto start = Clock::now();
  const auto tokens = static_cast<std::size_t>(mail_.box->tokens);
  const auto layer = static_cast<std::size_t>(mail_.box->layer);
  const std::span<const std::uint64_t> addresses(tables_[layer], experts_);
  const bool late_helper = helper_is_late();
  if (!late_helper && all_here(addresses, tokens * top_k_)) {
    const StepInput input{nullptr, mail_.x, mail_.ids, nullptr, mail_.weights, tokens};
    store(compute_(input, addresses, mail_.rows) ? mail_.box->answered : mail_.box->refused, request);
  } else {
    if (late_helper || !wait_for_help(request)) {
      store(compute_alone(layer, tokens) ? mail_.box->answered : mail_.box->refused, request);
      answered_alone_.fetch_add(1, std::memory_order_relaxed);
    }
    helps_.fetch_add(1, std::memory_order_relaxed);
  }
  calls_.fetch_add(1, std::memory_order_relaxed);
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  nanoseconds_.fetch_add(static_cast<std::uint64_t>(spent.count()), std::memory_order_relaxed);
  layer_nanoseconds_[layer].fetch_add(static_cast<std::uint64_t>(spent.count()), std::memory_order_relaxed);
}

// Whether whoever helped with an earlier request, which was answered without, is still at work and may be moving
// records.
bool Mailbox::helper_is_late() const {
  if (!alone_) return false;
  const std::lock_guard lock(meeting_->mutex);
  return meeting_->helping;
}

// False where nobody came to help, or whoever came stopped getting on: the request is then closed to help.
bool Mailbox::wait_for_help(std::uint32_t request) {
  Meeting &meet = *meeting_;
  std::unique_lock lock(meet.mutex);
  meet.help = request;
  meet.changed.notify_all();
  const auto over = [&] { return meet.help == 0 || stop_.load(); };
  if (!alone_) {
    meet.changed.wait(lock, over);
    return true;
  }
  for (std::uint64_t seen = meet.steps; !meet.changed.wait_for(lock, alone_->stuck, over); seen = meet.steps)
    if (meet.steps == seen) {
      meet.help = 0;
      return false;
    }
  return true;
}

// The rows of the request in the mailbox, from the disk alone: what is in DRAM may be on its way out.
bool Mailbox::compute_alone(std::size_t layer, std::size_t tokens) {
  std::uint8_t *room = room_.data() + (kPage - reinterpret_cast<std::uintptr_t>(room_.data()) % kPage) % kPage;
  std::vector<std::uint64_t> here(experts_, 0);
  std::vector<bool> routed(experts_, false);
  for (std::size_t p = 0; p < tokens * top_k_; ++p)
    if (mail_.ids[p] >= 0 && static_cast<std::size_t>(mail_.ids[p]) < experts_)
      routed[static_cast<std::size_t>(mail_.ids[p])] = true;
  const StepInput input{nullptr, mail_.x, mail_.ids, nullptr, mail_.weights, tokens};
  for (std::size_t expert = 0; expert < experts_; ++expert) {
    if (!routed[expert]) continue;
    if (!alone_->records.read(layer, expert, room) && !alone_->records.read(layer, expert, room)) return false;
    here[expert] = reinterpret_cast<std::uintptr_t>(room) + alone_->records.shift;
    while (!compute_(input, here, mail_.rows)) { // whoever helps is inside the kernel, and leaves it by itself
      if (stop_.load()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    here[expert] = 0;
  }
  return true;
}

std::uint32_t Mailbox::await_help(std::chrono::milliseconds timeout) {
  Meeting &meet = meeting();
  std::unique_lock lock(meet.mutex);
  const auto asked = [&] { return meet.help != 0 && meet.help != meet.taken; };
  meet.changed.wait_for(lock, timeout, [&] { return asked() || stop_.load(); });
  if (!asked()) return 0;
  meet.helping = true;
  ++meet.steps;
  return meet.taken = meet.help;
}

bool Mailbox::answer(std::uint32_t request, const float *rows) {
  return helped(request, mail_.box->answered, rows);
}

bool Mailbox::refuse(std::uint32_t request) {
  return helped(request, mail_.box->refused, nullptr);
}

bool Mailbox::helped(std::uint32_t request, unsigned &word, const float *rows) {
  Meeting &meet = meeting();
  {
    const std::lock_guard lock(meet.mutex);
    meet.helping = false;
    if (meet.help != request) return false;
    const std::size_t pairs = static_cast<std::size_t>(mail_.box->tokens) * top_k_;
    for (std::size_t p = 0; rows != nullptr && p < pairs; ++p)
      if (mail_.ids[p] >= 0) std::copy_n(rows + p * mail_.hidden, mail_.hidden, mail_.rows + p * mail_.hidden);
    store(word, request);
    meet.help = 0;
  }
  meet.changed.notify_all();
  return true;
}

bool Mailbox::forget(std::uint32_t request, std::size_t expert) {
  Meeting &meet = meeting();
  const std::lock_guard lock(meet.mutex);
  if (meet.help != request) return false;
  tables_[static_cast<std::size_t>(mail_.box->layer)][expert] = 0;
  ++meet.steps;
  return true;
}

void Mailbox::progress() {
  Meeting &meet = meeting();
  const std::lock_guard lock(meet.mutex);
  ++meet.steps;
}

Mailbox::Counts Mailbox::counts() const {
  return {calls_.load(), nanoseconds_.load(), helps_.load(), answered_alone_.load()};
}

} // namespace moetier
