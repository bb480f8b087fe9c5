-- Reserve amounts for a request from all of its holders, or from none of them. The Python twins are rules.admit and
-- rules.exceeded_limit; test_redis_store.py runs both against the same sequences.
--
-- KEYS: the hash and the leases of each holder; last the hash of what this worker has reserved.
-- ARGV: the request's id; the seconds of a lease; the time after which the request is too late; then for each holder its limits
-- (requests and tokens per minute, tokens per day and per month, cost per day and per month, concurrent; 0: none), and the
-- amounts (requests, slots, tokens, cost).
-- Costs are in whole nano-units.
-- Returns: the number of the holder that refuses (0: none, -1: too late), the number of its limit, the milliseconds to wait, the
-- time in microseconds, what is left of the limit as text; then for each holder the milliseconds until its buckets are full.
local request, lease_seconds, deadline = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if now > deadline then return {-1, 0, 0, math.floor(now * 1000000)} end
local ARGUMENTS = {'rpm', 'tpm', 'tokens_day', 'tokens_month', 'cost_day', 'cost_month', 'concurrent', 'requests', 'slots', 'tokens', 'cost'}
local day = math.floor(now / 86400)
local month = month_of(day)
local left_of_day = (day + 1) * 86400 - now
local left_of_month = first_day_of(month + 1) * 86400 - now

-- Make a period the current one; of the two other known periods, remember the later one: rules._start_period.
local function start_period(holder, p, period)
  if holder[p] == period then return end
  local o = 'o' .. p
  local found = holder[o] == period and {period, holder[o .. 't'], holder[o .. 'n']} or {period, 0, 0}
  if holder[o] == period or holder[p] > holder[o] then
    holder[o], holder[o .. 't'], holder[o .. 'n'] = holder[p], holder[p .. 't'], holder[p .. 'n']
  end
  holder[p], holder[p .. 't'], holder[p .. 'n'] = found[1], found[2], found[3]
end

-- The limit with the longest wait is reported.
local longest, refusing_holder, refusing_limit, left = -1, 0, 0, 0
local function refuse(holder, limit, wait, still_left)
  if wait > longest then longest, refusing_holder, refusing_limit, left = wait, holder, limit, still_left end
end
local function check_bucket(holder, number, full, limit, amount)
  if limit > 0 and amount > 0 then
    local wait = full - now - 60 * (1 - math.min(amount / limit, 1))
    if wait > 0.000001 then refuse(holder, number, wait, limit * (1 - (full - now) / 60)) end
  end
end
local function check_quota(holder, number, used, limit, amount, wait)
  if limit > 0 and amount > 0 and used + math.min(amount, limit) > limit then refuse(holder, number, wait, limit - used) end
end

-- Check all limits of all holders.
local count = (#KEYS - 1) / 2
local holders, arguments = {}, {}
for i = 1, count do
  local a = {}
  for j, name in ipairs(ARGUMENTS) do a[name] = tonumber(ARGV[3 + (i - 1) * #ARGUMENTS + j]) end
  local holder = read_holder(KEYS[2 * i - 1])
  holders[i], arguments[i] = holder, a
  if a.tokens_day > 0 or a.cost_day > 0 then start_period(holder, 'd', day) end
  if a.tokens_month > 0 or a.cost_month > 0 then start_period(holder, 'm', month) end
  if a.concurrent > 0 and a.slots > 0 then
    -- A gateway that died does not renew its leases; they expire.
    redis.call('ZREMRANGEBYSCORE', KEYS[2 * i], '-inf', now)
    if redis.call('ZCARD', KEYS[2 * i]) + a.slots > a.concurrent then refuse(i, 7, 1e12, 0) end
  end
  check_bucket(i, 1, holder.r, a.rpm, a.requests)
  check_bucket(i, 2, holder.t, a.tpm, a.tokens)
  check_quota(i, 3, holder.dt, a.tokens_day, a.tokens, left_of_day)
  check_quota(i, 4, holder.mt, a.tokens_month, a.tokens, left_of_month)
  check_quota(i, 5, holder.dn, a.cost_day, a.cost, left_of_day)
  check_quota(i, 6, holder.mn, a.cost_month, a.cost, left_of_month)
end

-- Reserve, and write down what was reserved, so that it is settled once.
if refusing_holder == 0 then
  local reserved = {}
  for i = 1, count do
    local a, holder = arguments[i], holders[i]
    if a.rpm > 0 then take_from_bucket(holder, 'r', 60 * a.requests / a.rpm) end
    if a.tpm > 0 then take_from_bucket(holder, 't', 60 * math.min(a.tokens / a.tpm, 1)) end
    if a.tokens_day > 0 then holder.dt = holder.dt + math.min(a.tokens, a.tokens_day) end
    if a.tokens_month > 0 then holder.mt = holder.mt + math.min(a.tokens, a.tokens_month) end
    if a.cost_day > 0 then holder.dn = holder.dn + math.min(a.cost, a.cost_day) end
    if a.cost_month > 0 then holder.mn = holder.mn + math.min(a.cost, a.cost_month) end
    write_holder(KEYS[2 * i - 1], holder)
    reserved[2 * i - 1] = request .. ' ' .. KEYS[2 * i - 1]
    reserved[2 * i] = string.format('%d %d %.17g %.17g %.17g', day, month, now, holder.r + holder.rb, holder.t + holder.tb)
    if a.concurrent > 0 and a.slots > 0 then
      redis.call('ZADD', KEYS[2 * i], now + lease_seconds, request)
      redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease_seconds) + 1)
    end
  end
  redis.call('HSET', KEYS[#KEYS], unpack(reserved))
  redis.call('EXPIRE', KEYS[#KEYS], 3 * 86400)
end

local reply = {refusing_holder, refusing_limit, math.ceil(longest * 1000), math.floor(now * 1000000), string.format('%.17g', left)}
for i = 1, count do
  reply[#reply + 1] = math.ceil(math.max(holders[i].r - now, 0) * 1000)
  reply[#reply + 1] = math.ceil(math.max(holders[i].t - now, 0) * 1000)
end
return reply
